"""Plain PyTorch in the place of GPU packages, with their names and signatures: for dry runs of the race's adapters."""

import enum
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.race.adapters import STAND_IN
from torch import Tensor, nn


def _swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, -1)
    return F.silu(gate) * up


def _experts(x: Tensor, w_in: Tensor, w_out: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Gated experts, one after another: w_in (E, 2F, D), w_out (E, D, F), ids and weights (T, K)."""
    y = torch.zeros_like(x, dtype=torch.float32)
    for e in range(w_in.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        rows = F.linear(_swiglu(F.linear(x[token], w_in[e])), w_out[e]).float()
        y = y.index_add(0, token, rows * weights[token, slot, None].float())
    return y.to(x.dtype)


class _Fused:
    """`liger_kernel.ops.fused_moe.LigerFusedMoEFunction`."""

    @staticmethod
    def apply(
        x: Tensor,
        gate_up_proj: Tensor,
        down_proj: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        assert top_k_index.dtype == torch.int32
        return _experts(x, gate_up_proj, down_proj, top_k_index, top_k_weights)


class _ExpertParallel(nn.Module):
    """`liger_kernel.transformers.moe.LigerExpertParallelFusedMoe`."""

    def __init__(self, process_group: Any = None) -> None:
        super().__init__()
        self.process_group = process_group

    def forward(
        self,
        hidden_states: Tensor,
        expert_indices: Tensor,
        expert_weights: Tensor,
        all_B: Tensor,
        all_C: Tensor,
        all_A: Tensor,
        num_experts: int,
    ) -> Tensor:
        assert all_B.is_contiguous() and all_C.is_contiguous() and len(all_B) == num_experts
        w_in = torch.cat([all_B, all_C], 1)
        return _experts(hidden_states, w_in, all_A, expert_indices, expert_weights)


class _MoEConfig(SimpleNamespace):
    """`liger_cute_kernels.MoEConfig`."""

    def __init__(
        self,
        *,
        max_tokens: int,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        num_hosts: int,
        gpus_per_host: int,
        group: str | None = None,
        max_inflight: int = 1,
    ) -> None:
        super().__init__(max_tokens=max_tokens, num_experts=num_experts)


def _configure(
    *,
    process_groups: Any = None,
    bootstrap_group: Any = None,
    device: torch.device | None = None,
    flsce: Any = None,
    moe: _MoEConfig | None = None,
) -> None:
    assert bootstrap_group is not None and moe is not None


class _Activation(enum.Enum):
    SWIGLU = "swiglu"


def _sonic(
    x: Tensor,
    router_w: Tensor,
    w1: Tensor,
    b1: None,
    w2: Tensor,
    b2: None,
    K: int,
    stream_id: int,
    activation_type: _Activation = _Activation.SWIGLU,
    is_inference_mode_enabled: bool = False,
    is_softmax_over_topk: bool = True,
    norm_topk_probs: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x, router_w)
    top, ids = logits.topk(K)
    assert concat_layout
    y = _experts(x, w1.permute(2, 0, 1), w2.permute(2, 0, 1), ids, top.float().softmax(-1))
    return y, logits, ids


def _sonic_general(
    x: Tensor,
    router_scores: Tensor,
    token_indices: Tensor,
    expert_indices: Tensor,
    w1: Tensor,
    b1: None,
    w2: Tensor,
    b2: None,
    E: int,
    stream_id: int,
    activation_type: _Activation,
    is_inference_mode_enabled: bool = False,
    concat_layout: bool = False,
) -> tuple[Tensor, Tensor]:
    K = len(token_indices) // len(x)
    assert torch.equal(token_indices.view(-1, K)[:, 0].long(), torch.arange(len(x)))
    ids, scores = expert_indices.view(-1, K), router_scores.view(-1, K)
    return _experts(x, w1.permute(2, 0, 1), w2.permute(2, 0, 1), ids, scores), ids


def _flatten_sort_count(expert_idxs: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    sorted_ids, order = expert_idxs.flatten().sort()
    return sorted_ids, order, expert_idxs.flatten().bincount(minlength=num_experts).cumsum(-1)


def _parallel_linear(
    inputs: Tensor,
    expert_weights: Tensor,
    k: int,
    sorted_expert_idxs: Tensor,
    sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
) -> Tensor:
    rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
    sizes = expert_offsets.diff(prepend=expert_offsets.new_zeros(1)).tolist()
    out = torch.cat([r @ w for r, w in zip(rows.split(sizes), expert_weights, strict=True)])
    if not grouped_out:
        out = torch.empty_like(out).index_copy(0, sorted_scattered_idxs, out)
    if gates is None:
        return out
    return (out.view(*gates.shape, -1) * gates[..., None]).sum(1)


class _GroupedLinear(nn.Module):
    """`transformer_engine.pytorch.GroupedLinear`."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        for e in range(num_gemms):
            empty = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            setattr(self, f"weight{e}", nn.Parameter(empty))

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:
        parts = inp.split(m_splits)
        return torch.cat([F.linear(x, getattr(self, f"weight{e}")) for e, x in enumerate(parts)])


class _TutelLayer(nn.Module):
    """What `tutel.moe.moe_layer` gives, dropless, with its own experts."""

    def __init__(self, gate_type: dict[str, Any], experts: dict[str, Any], model_dim: int) -> None:
        super().__init__()
        E, H = experts["count_per_node"], experts["hidden_size_per_expert"]
        self.top_k, self.act = gate_type["k"], experts["activation_fn"]
        gate = nn.Module()
        gate.wg = nn.Linear(model_dim, E, bias=False)
        self.gates = nn.ModuleList([gate])
        self.experts = nn.Module()
        for name, size in (
            ("fc1_w", (E, H, model_dim)),
            ("fc2_w", (E, H, model_dim)),
            ("fc1_bias", (E, H)),
            ("fc2_bias", (E, model_dim)),
        ):
            setattr(self.experts, f"batched_{name}", nn.Parameter(torch.zeros(size)))

    def forward(self, x: Tensor) -> Tensor:
        own = self.experts
        weights, ids = self.gates[0].wg(x).softmax(-1).topk(self.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for e in range(len(own.batched_fc1_w)):
            token, slot = (ids == e).nonzero(as_tuple=True)
            h = self.act(F.linear(x[token], own.batched_fc1_w[e], own.batched_fc1_bias[e]))
            rows = h @ own.batched_fc2_w[e] + own.batched_fc2_bias[e]
            y = y.index_add(0, token, rows * weights[token, slot, None])
        return y


MODULES: dict[str, dict[str, Any]] = {
    "liger_kernel": {},
    "liger_kernel.ops": {},
    "liger_kernel.ops.fused_moe": {"LigerFusedMoEFunction": _Fused},
    "liger_kernel.transformers": {},
    "liger_kernel.transformers.moe": {"LigerExpertParallelFusedMoe": _ExpertParallel},
    "liger_cute_kernels": {"MoEConfig": _MoEConfig, "configure": _configure},
    "sonicmoe": {"moe_TC_softmax_topk_layer": _sonic, "moe_general_routing_inputs": _sonic_general},
    "sonicmoe.enums": {"ActivationType": _Activation},
    "scattermoe": {},
    "scattermoe.parallel_experts": {
        "flatten_sort_count": _flatten_sort_count,
        "parallel_linear": _parallel_linear,
    },
    "transformer_engine": {},
    "transformer_engine.pytorch": {"GroupedLinear": _GroupedLinear},
    "tutel": {"moe": SimpleNamespace(moe_layer=_TutelLayer)},
}


def install() -> None:
    """Put them into `sys.modules`, where the packages are not imported yet."""
    for name, members in MODULES.items():
        if name not in sys.modules:
            module = ModuleType(name)
            module.__spec__ = ModuleSpec(name, None)
            module.__path__ = []
            vars(module).update(members)
            setattr(module, STAND_IN, name)
            sys.modules[name] = module


def remove() -> None:
    """Take them out again."""
    for name in MODULES:
        if hasattr(sys.modules.get(name), STAND_IN):
            del sys.modules[name]
