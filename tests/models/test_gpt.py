"""The GPT: structure, exactness of its options, and everything that PyTorch users do to a model."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64, assert_differs, assert_two_times
from tests.support.memory import saved_bytes
from torch import Tensor

from expertmesh.config.moe import MoEConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT, GPTOutput
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.routing_noise import key_noise

VOCAB, SEQ = 61, 12


def config(*, moe: dict[str, Any] | None = None, **options: Any) -> ModelConfig:
    experts: dict[str, Any] = {"num_experts": (4,), "top_k": 2, "hidden_dim": 20}
    if moe is not None:
        experts = experts | moe if moe.get("num_experts") != () else moe
    defaults: dict[str, Any] = {
        "vocab_size": VOCAB,
        "max_seq_len": 32,
        "dim": 24,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_dim": 28,
        "init_std": 0.2,
    }
    return ModelConfig(moe=MoEConfig(**experts), **(defaults | options))


def model(*, dtype: torch.dtype = torch.float64, seed: int = 0, **options: Any) -> GPT:
    return GPT(config(**options), dtype=dtype, seed=seed)


def token_ids(batch: int = 3, seq_len: int = SEQ, *, seed: int = 1) -> Tensor:
    return torch.randint(VOCAB, (batch, seq_len), generator=torch.Generator().manual_seed(seed))


def loss_of(output: GPTOutput, ids_BS: Tensor) -> Tensor:
    logits = output.logits_BSV[:, :-1].flatten(0, 1)
    loss = F.cross_entropy(logits, ids_BS[:, 1:].flatten())
    return loss + sum(stats.aux_loss + stats.z_loss for stats in output.stats)


def loss_and_gradients(gpt: GPT, ids_BS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    gpt.zero_grad(set_to_none=True)
    loss = loss_of(gpt(ids_BS), ids_BS)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in gpt.named_parameters() if p.grad is not None}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dense": {"moe": {"num_experts": ()}},
    "every-other": {"num_layers": 4, "moe_every": 2},
    "pyramid": {"num_layers": 3, "moe": {"num_experts": (2, 4, 6)}},
    "residual": {"moe": {"residual": True}},
    "shared": {"moe": {"num_shared_experts": 1}},
    "gelu-bias": {"activation": "gelu", "moe": {"bias": True}},
    "qk-norm-untied": {"qk_norm": True, "tie_embeddings": False},
    "wide-heads": {"head_dim": 10, "num_kv_heads": 1},
}


@pytest.fixture(params=VARIANTS.values(), ids=VARIANTS.keys())
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.param


def test_shapes_dtypes_and_statistics(options: dict[str, Any]) -> None:
    gpt = model(**options)
    output = gpt(token_ids())
    assert output.logits_BSV.shape == (3, SEQ, VOCAB)
    assert output.logits_BSV.dtype == torch.float64
    experts = [count for count in gpt.config.experts_per_layer() if count]
    assert [len(stats.num_tokens_per_expert_E) for stats in output.stats] == experts
    for stats in output.stats:
        assert int(stats.num_tokens_per_expert_E.sum()) == 3 * SEQ * gpt.config.moe.top_k


def test_the_future_does_not_change_the_past(options: dict[str, Any]) -> None:
    gpt = model(**options).eval()
    ids = token_ids()
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % VOCAB
    before, after = gpt(ids).logits_BSV, gpt(changed).logits_BSV
    assert_close_fp64(after[:, :7], before[:, :7], what="logits before the change")
    assert_differs(after[:, 7:], before[:, 7:], what="logits after the change")


def test_every_parameter_gets_a_gradient(options: dict[str, Any]) -> None:
    gpt = model(**options)
    _, gradients = loss_and_gradients(gpt, token_ids(6))
    for name, parameter in gpt.named_parameters():
        assert name in gradients, f"{name} has no gradient"
        assert gradients[name].isfinite().all(), name
        assert gradients[name].any(), f"{name} has a gradient of zeros"
        assert gradients[name].shape == parameter.shape


def test_state_dict_round_trip(options: dict[str, Any]) -> None:
    source, target = model(**options), model(seed=5, **options)
    ids = token_ids()
    assert_differs(target(ids).logits_BSV, source(ids).logits_BSV, what="another seed")
    target.load_state_dict(source.state_dict(), strict=True)
    assert torch.equal(target(ids).logits_BSV, source(ids).logits_BSV)


def test_meta_construction_then_init_equals_direct_construction(options: dict[str, Any]) -> None:
    empty = GPT(config(**options), device="meta", dtype=torch.float64)
    assert all(p.is_meta for p in empty.parameters())
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(torch.nan)
    empty.init_weights(0)
    direct = model(**options)
    for (name, mine), theirs in zip(empty.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
    ids = token_ids()
    assert torch.equal(empty.eval()(ids).logits_BSV, direct.eval()(ids).logits_BSV)


@pytest.mark.parametrize("noise", ["none", "gumbel"])
def test_activation_checkpointing_changes_nothing(options: dict[str, Any], noise: str) -> None:
    """With router noise and random drops the recomputed routing must be the one of the forward pass."""
    moe = options.get("moe", {})
    if moe.get("num_experts") != ():
        options = options | {"moe": {"router_noise": noise, "capacity_factor": 1.0} | moe}
    plain, recomputed = model(**options), model(**options)
    recomputed.set_activation_checkpointing(True)
    ids = token_ids(6)
    results = []
    for gpt in (plain, recomputed):
        torch.manual_seed(3)
        results.append(loss_and_gradients(gpt, ids))
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        assert torch.equal(gradient, results[1][1][name]), name


def test_layers_are_recomputed_in_the_mode_of_their_forward_pass() -> None:
    """Scores of evaluation may get gradients after the model is in training mode again, whose noise chooses other
    experts."""
    plain, recomputed = (model(moe={"router_noise": "gumbel", "router_noise_std": 3.0}) for _ in "12")
    recomputed.set_activation_checkpointing(True)
    found = []
    for gpt in (plain, recomputed):
        output = gpt.eval()(token_ids())
        gpt.train()
        output.logits_BSV.square().mean().backward()
        assert all(module.training for module in gpt.modules())
        found.append([p.grad for p in gpt.parameters() if p.grad is not None])
    assert found[0] and all(map(torch.equal, *found))


@pytest.mark.parametrize("mode", [True, False], ids=["training", "evaluation"])
def test_activation_checkpointing_keeps_less(mode: bool) -> None:
    kept = []
    for enabled in (False, True):
        gpt = model(num_layers=4).train(mode)
        gpt.set_activation_checkpointing(enabled)
        kept.append(saved_bytes(partial(gpt, token_ids()), parameters=gpt.parameters()))
    assert kept[1] < kept[0] / 2


def test_noise_follows_the_global_token_index() -> None:
    """A micro-batch of the second half of a batch gets the noise of that half."""
    gpt = model(moe={"router_noise": "gumbel", "router_noise_std": 3.0, "balance_loss": "none"})
    key_noise(gpt, seed=0, step=1)
    ids = token_ids(4)
    whole = gpt(ids).logits_BSV
    half = gpt(ids[2:], token_index=torch.arange(2 * SEQ, 4 * SEQ)).logits_BSV
    assert_close_fp64(half, whole[2:], what="the second half alone")
    assert_differs(gpt(ids[2:]).logits_BSV, whole[2:], what="the second half as if it were the first")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_the_others(options: dict[str, Any], side: str) -> None:
    gpt = model(**options).eval()
    ids = token_ids()
    pad = torch.full((3, 4), 13)
    parts, masks = [ids, pad], [torch.ones_like(ids), torch.zeros_like(pad)]
    if side == "left":
        parts, masks = parts[::-1], masks[::-1]
    mask = torch.cat(masks, 1).bool()
    output = gpt(torch.cat(parts, 1), token_mask_BS=mask)
    expected = gpt(ids)
    real = output.logits_BSV[mask].view(3, SEQ, VOCAB)
    assert_close_fp64(real, expected.logits_BSV, what="logits of the real tokens")
    assert output.logits_BSV.isfinite().all()
    for padded, alone in zip(output.stats, expected.stats, strict=True):
        assert torch.equal(padded.num_tokens_per_expert_E, alone.num_tokens_per_expert_E)
        assert_close_fp64(padded.aux_loss, alone.aux_loss, what="balance loss")


def test_num_logits_are_the_last_ones() -> None:
    gpt = model()
    ids = token_ids()
    whole = gpt(ids).logits_BSV
    assert_close_fp64(gpt(ids, num_logits=2).logits_BSV, whole[:, -2:], what="last logits")
    assert torch.equal(gpt(ids, num_logits=SEQ + 2).logits_BSV, whole)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = model(), model(tie_embeddings=False)
    assert "output.weight" not in tied.state_dict()
    assert untied.state_dict()["output.weight"].shape == (VOCAB, 24)
    with torch.no_grad():
        tied.embedding.weight[5] = 0
    logits = tied(token_ids()).logits_BSV
    assert torch.equal(logits[..., 5], torch.zeros_like(logits[..., 5]))


def test_expert_counts_and_places() -> None:
    gpt = model(num_layers=6, moe_every=2, moe={"num_experts": (2, 4, 8)})
    counts = [block.moe.num_experts if block.moe else 0 for block in gpt.layers]
    assert counts == [0, 2, 0, 4, 0, 8]
    assert all((block.ffn is None) == (block.moe is not None) for block in gpt.layers)


def test_initial_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = model(seed=3)
    torch.manual_seed(1)
    second, other = model(seed=3), model(seed=4)
    for (name, a), b, c in zip(first.named_parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert torch.equal(a, c) == name.endswith("norm.weight"), name


def test_initial_scale_of_every_kind_of_parameter() -> None:
    """N(0, init_std^2); projections back to the stream are smaller by sqrt(2 num_layers)."""
    gpt = GPT(config(dim=96, num_layers=8, moe={"residual": True, "hidden_dim": 64}), seed=0)
    for name, parameter in gpt.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        if name.endswith("bias"):
            assert not parameter.any(), name
            continue
        returns = name.endswith(("out.weight", "w_out"))
        expected = 0.2 / (4 if returns else 1)
        # Five standard errors of a standard deviation from n normal numbers.
        error = 5 * expected / (2 * parameter.numel()) ** 0.5
        assert abs(float(parameter.detach().std()) - expected) < error, name


@pytest.mark.parametrize("name", ["plain", "dense", "residual"])
def test_low_precision_is_as_exact_as_plain_pytorch(name: str) -> None:
    """FP32 against FP64: the same weights, the two-times rule against the same model run at FP32 by another path."""
    exact = model(**VARIANTS[name]).eval()
    ours = model(dtype=torch.float32, **VARIANTS[name]).eval()
    exact.load_state_dict(ours.state_dict())
    reference = copy.deepcopy(ours)
    for block in reference.layers:
        if isinstance(block.moe, MoELayer):
            block.moe = MoELayer.from_config(
                ours.config.moe.model_copy(update={"backend": "reference"}),
                dim=ours.config.dim,
                num_experts=block.moe.num_experts,
                activation=ours.config.activation,
                residual_hidden_dim=ours.config.ffn_hidden_dim,
                layer_index=0,
            )
    reference.load_state_dict(ours.state_dict())
    ids = token_ids()
    results = [gpt.eval()(ids).logits_BSV for gpt in (ours, reference, exact)]
    assert_two_times(*results, what="FP32 logits")


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_compute_the_same(copier: Callable[[GPT], GPT]) -> None:
    gpt = model()
    ids = token_ids()
    clone = copier(gpt)
    assert torch.equal(clone(ids).logits_BSV, gpt(ids).logits_BSV)
    with torch.no_grad():
        clone.embedding.weight.zero_()
    assert gpt(ids).logits_BSV.any()


# PyTorch's own compiler makes the object that PyTorch's own warning says nobody should make.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["dense"], marks=pytest.mark.exhaustive),  # its layers are the other's, too
        ["every-other", "residual", "qk-norm-untied"],
    ],
)
def test_compiles_into_one_graph(names: list[str]) -> None:
    options = {option: v for name in names for option, v in VARIANTS[name].items()}
    gpt = model(**options | {"num_layers": 2})  # the time of a trace goes with the layers
    ids = token_ids()
    eager_loss, eager = loss_and_gradients(gpt, ids)
    torch._dynamo.reset()
    compiled = torch.compile(gpt, fullgraph=True, backend="aot_eager")
    gpt.zero_grad(set_to_none=True)
    loss = loss_of(compiled(ids), ids)
    loss.backward()
    assert_close_fp64(loss.detach(), eager_loss, what="compiled loss")
    for parameter_name, parameter in gpt.named_parameters():
        assert_close_fp64(parameter.grad, eager[parameter_name], what=parameter_name)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_one_graph_and_one_program_take_any_number_of_tokens() -> None:
    gpt, ids = model(num_layers=1).eval(), token_ids()
    torch._dynamo.reset()
    compiled = torch.compile(gpt, fullgraph=True, dynamic=True, backend="eager")
    sizes = ({0: torch.export.Dim("B", min=2), 1: torch.export.Dim("S", min=2, max=ids.shape[1])},)
    program = torch.export.export(gpt, (ids,), dynamic_shapes=sizes).module()
    for length in (2, ids.shape[1] - 1, ids.shape[1]):
        expected = gpt(ids[:, :length]).logits_BSV
        for ours in (compiled, program):
            found = ours(ids[:, :length].clone()).logits_BSV
            assert_close_fp64(found, expected, what=f"{length} tokens")
