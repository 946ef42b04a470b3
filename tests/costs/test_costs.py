"""Costs from the configuration alone, against the real model."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig
from expertmesh.costs.memory import PeakMemory, peak_memory
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.gpt.spec import count_parameters, gpt_spec
from expertmesh.models.token_losses import token_losses
from expertmesh.training.optim import build_optimizer

BATCH, SEQ = 3, 37
# How far the activation estimate may be from what autograd saves; it is printed as an estimate.
ACTIVATION_TOLERANCE = 0.1


def config(*, moe: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    experts: dict[str, Any] = {"num_experts": (4,), "top_k": 2, "hidden_dim": 48}
    if moe is not None:
        experts = experts | moe if moe.get("num_experts") != () else moe
    defaults: dict[str, Any] = {
        "vocab_size": 128,
        "max_seq_len": 64,
        "dim": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_dim": 96,
    }
    return ModelConfig(moe=MoEConfig(**experts), **(defaults | options))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"moe": {"num_experts": ()}},
    "dense-gelu": {"moe": {"num_experts": ()}, "activation": "gelu"},
    "every-other": {"moe_every": 2},
    "uneven": {"num_layers": 5, "moe_every": 2},
    "pyramid": {"moe": {"num_experts": (2, 4, 6, 8)}},
    "residual": {"moe": {"residual": True}},
    "residual-bias": {"moe": {"residual": True, "bias": True}},
    "shared": {"moe": {"num_shared_experts": 2, "bias": True}},
    "shared-gate": {"moe": {"num_shared_experts": 2, "shared_gate": True}},
    "relu2": {"activation": "relu2"},
    "qk-norm-untied": {"qk_norm": True, "tie_embeddings": False},
    "wide-heads": {"head_dim": 10, "num_kv_heads": 1},
    "cosine": {"moe": {"router": "cosine", "cosine_dim": 12}},
    "hash": {"moe": {"router": "hash"}},
    "expert-choice": {"moe": {"router": "expert_choice"}},
    "expert-bias": {"moe": {"bias_update_rate": 0.01}},
    "recompute-h": {"moe": {"recompute_h": True}},
}
all_variants = pytest.mark.parametrize("name", VARIANTS)


@all_variants
def test_parameters_equal_the_model(name: str) -> None:
    cfg = config(**VARIANTS[name])
    model = GPT(cfg, device="meta")
    count = count_parameters(cfg)
    sizes = {n: p.numel() for n, p in model.named_parameters()}

    def sum_of(*parts: str) -> int:
        return sum(size for n, size in sizes.items() if any(part in n for part in parts))

    assert count.total == sum(sizes.values())
    assert count.embedding == sum_of("embedding.")
    assert count.output == sum_of("output.")
    assert count.attention == sum_of(".attention.")
    assert count.dense_ffn == sum_of(".ffn.")
    assert count.router == sum_of(".router.")
    assert count.experts == sum_of(".experts.")
    assert count.shared == sum_of(".shared_experts.", ".shared_gate.")
    assert count.residual == sum_of(".residual_")
    shapes = {p.name: p.shape for p in gpt_spec(cfg)}
    assert shapes == {n: tuple(p.shape) for n, p in model.named_parameters()}


@all_variants
def test_active_parameters_are_those_of_a_model_with_k_experts(name: str) -> None:
    """Without the routers, whose every row is used."""
    cfg = config(**VARIANTS[name])
    few = cfg.model_copy(update={"moe": cfg.moe.model_copy(update={"num_experts": (2,)})})
    count, only_active = count_parameters(cfg), count_parameters(few)
    if cfg.moe.num_experts:
        assert count.active - count.router == only_active.total - only_active.router
    else:
        assert count.active == count.total


def counted_flops(cfg: ModelConfig, *, backward: bool) -> int:
    """What torch's counter sees, with attention as plain matrix products."""
    model = GPT(cfg, seed=0)
    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = model(ids).logits_BSV
        if backward:
            logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", ["dense", "dense-gelu", "wide-heads"])
def test_flops_equal_torch_counter(name: str, backward: bool) -> None:
    """The counter does not see inside the experts' operator, so the feed-forward layers are dense here."""
    cfg = config(**(VARIANTS[name] | {"moe": {"num_experts": ()}}))
    forward = forward_flops(cfg, seq_len=SEQ, causal=False)
    expected = forward.training_flops() if backward else forward.total_flops
    assert counted_flops(cfg, backward=backward) == BATCH * SEQ * expected


@all_variants
def test_moe_flops_are_those_of_a_dense_model_of_k_experts_width(name: str) -> None:
    cfg = config(**VARIANTS[name])
    forward = forward_flops(cfg, seq_len=SEQ)
    wide = config(
        ffn_hidden_dim=cfg.moe.top_k * cfg.moe.hidden_dim,
        moe={"num_experts": ()},
        activation=cfg.activation,
    )
    per_layer = forward_flops(wide, seq_len=SEQ).dense_ffn_flops // wide.num_layers
    assert forward.experts_flops == len([e for e in cfg.experts_per_layer() if e]) * per_layer


@pytest.mark.parametrize("router, most", [("topk", None), ("expert_choice", None), ("expert_choice", 1.5)])
def test_experts_count_as_often_as_they_are_passed(router: str, most: float | None) -> None:
    """A capacity above 1 makes room for tokens that choose, and is filled by experts that do."""
    moe = {"router": router, "capacity_factor": 1.25, "max_capacity_factor": most}
    cfg = config(moe=moe | {"num_experts": (5, 5, 2, 2)}, num_layers=4)
    stats = GPT(cfg, seed=0).train()(torch.randint(128, (BATCH, 40))).stats
    rows = [s.num_tokens_per_expert_E.sum().item() / (BATCH * 40) for s in stats]
    per_row = forward_flops(config(moe={"top_k": 1}), seq_len=SEQ).experts_flops / 4
    assert forward_flops(cfg, seq_len=SEQ).experts_flops == sum(rows) * per_row


def test_a_gate_of_shared_experts_counts() -> None:
    gated, plain = (
        forward_flops(config(moe={"num_shared_experts": 1, "shared_gate": gate}), seq_len=SEQ) for gate in (True, False)
    )
    assert gated.shared_flops - plain.shared_flops == 4 * 2 * 32 * 1


def test_causal_attention_counts_the_visible_keys() -> None:
    cfg = config()
    full = forward_flops(cfg, seq_len=SEQ, causal=False).attention_flops
    causal = forward_flops(cfg, seq_len=SEQ).attention_flops
    visible = sum(range(1, SEQ + 1))
    assert causal * SEQ * SEQ == full * visible


def test_recomputation_costs_one_more_forward_of_the_layers() -> None:
    forward = forward_flops(config(), seq_len=SEQ)
    extra = forward.training_flops(activation_checkpointing=True) - forward.training_flops()
    assert extra == forward.layers_flops


def saved_bytes(cfg: ModelConfig, *, dtype: str) -> int:
    """Bytes that autograd keeps after a forward pass with the trainer's loss; parameters and their casts left out.

    Each storage counts once; the gradient of the logits is added.
    """
    model = GPT(cfg, dtype=torch.float64 if dtype == "float64" else torch.float32, seed=0)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    weight_sizes = {p.numel() for p in model.parameters() if p.dim() > 1}
    low = dtype in ("bfloat16", "float16")
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        is_cast_weight = low and t.numel() in weight_sizes
        if t.untyped_storage().data_ptr() not in owned and not is_cast_weight:
            # Held here too, so that no other tensor gets the same address.
            kept[t.untyped_storage().data_ptr()] = t
        return t

    ids = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.autocast("cpu", enabled=low, dtype=torch.bfloat16):
            logits = model(ids).logits_BSV
        losses = token_losses(logits, ids)
    assert losses.isfinite().all()
    pack(logits)
    return sum(t.untyped_storage().nbytes() for t in kept.values()) + logits.nbytes


def estimated(cfg: ModelConfig, *, micro_batch: int = BATCH, checkpointing: Any = "none", **options: Any) -> PeakMemory:
    layout = RankLayout(1, micro_batch=micro_batch, checkpointing=checkpointing)
    work = Workload(SEQ, on_gpu=False, **({"precision": "float32"} | options))
    return peak_memory(sizes_of(cfg), layout, work)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "dense", "dense-gelu", "every-other", "residual", "shared"])
def test_activation_estimate_is_near_what_autograd_saves(name: str, dtype: str) -> None:
    cfg = config(**VARIANTS[name], dim=64, num_layers=4)
    estimate = estimated(cfg, precision=dtype)
    measured = saved_bytes(cfg, dtype=dtype)
    assert abs(estimate.activations_bytes + estimate.logits_bytes - measured) <= ACTIVATION_TOLERANCE * measured


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_memory_of_weights_gradients_and_optimizer_is_exact(name: Any) -> None:
    cfg = config()
    model = GPT(cfg, seed=0)
    optimizer = build_optimizer(model, OptimConfig(name=name))
    model(torch.zeros(1, SEQ, dtype=torch.int64)).logits_BSV.sum().backward()
    optimizer.step()
    estimate = estimated(cfg, optimizer=name)
    parameters = list(model.parameters())
    moments = [value for p in parameters for key, value in optimizer.state[p].items() if key != "step"]
    assert estimate.weights_bytes == sum(p.nbytes for p in parameters)
    assert estimate.gradients_bytes == sum(p.grad.nbytes for p in parameters)
    assert estimate.optimizer_bytes == sum(m.nbytes for m in moments)
    assert estimate.copies_bytes == 0


def test_memory_adds_up_and_follows_the_options() -> None:
    cfg = config()
    base, low = estimated(cfg), estimated(cfg, precision="bfloat16")
    double, full = estimated(cfg, precision="float64"), estimated(cfg, checkpointing="full")
    kept = base.activations_bytes + base.logits_bytes
    assert base.device_bytes == 4 * base.weights_bytes + kept
    assert low.copies_bytes == low.weights_bytes / 2
    assert low.activations_bytes < base.activations_bytes < double.activations_bytes
    assert double.weights_bytes == 2 * base.weights_bytes
    assert full.activations_bytes < base.activations_bytes
    assert estimated(cfg, micro_batch=2 * BATCH).activations_bytes == 2 * base.activations_bytes
