"""Replacement for Tutel's `moe_layer`: same signature, documented semantics, state dicts in both directions.

Change `from tutel import moe as tutel_moe` to `from expertmesh.integrations import tutel as tutel_moe`; Tutel itself is
not needed. Where Tutel's code differs from its documentation, this module follows the documentation:

* arguments of a call apply to that call only; dictionaries that are passed in are not changed;
* gate noise affects the choice only, and has the scale that `load_importance_loss` assumes;
* dropless means that no token is dropped, also with batch-prioritized routing, and no row is padded;
* the backward pass of a process group other than the world uses that group;
* gated experts are correct for every `adaptive_r`, odd `model_dim` and empty batches work, missing experts are an
  error.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.comm.world import World
from expertmesh.config.values import check_choice
from expertmesh.errors import ConfigError
from expertmesh.moe.dispatch import LocalDispatcher
from expertmesh.moe.foreign_names import ForeignName, from_foreign, keep_where_refused, to_foreign
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.match_mlp import match_activation
from expertmesh.parallel.experts.dispatcher import spread_experts

_COUNT_NAMES = ("num_experts_per_device", "count_per_node", "local_experts")
_FFN = {"hidden_size_per_expert", "activation_fn", "has_fc1_bias", "has_fc2_bias", "output_dim"}
_LLAMA = {"hidden_size_per_expert", "activation_fn"}
_GATES = {
    "top": {"k", "fp32_gate", "capacity_factor", "gate_noise"},
    "cosine_top": {"k", "fp32_gate", "capacity_factor", "gate_noise", "proj_dim", "init_t"},
}


class MOELayer(nn.Module):
    """MoE layer with the interface of Tutel's `moe_layer`.

    If torch.distributed is initialised, the experts are sharded over the ranks of `group` at construction. The
    optimizer then sees each rank's shard, whose gradients are sums over all ranks (as in Tutel, do not all-reduce
    parameters that `scan_expert_func` was called with). On one process `state_dict` uses Tutel's names.

    Args:
        gate_type: {"type": "top" or "cosine_top", "k", "capacity_factor", "gate_noise", "fp32_gate", "proj_dim"}; the gate
            always computes in FP32. capacity_factor above 0: rows per expert as a ratio of the even share; 0: dropless;
            below 0: at most that ratio.
        model_dim: size of a token (D).
        experts: {"type": "ffn" or "llama_ffn", "num_experts_per_device", "hidden_size_per_expert", "activation_fn",
            "has_fc1_bias", "has_fc2_bias"}; a negative number of experts per device is the number of devices per expert.
        scan_expert_func: called with the name and the parameter of each expert weight, which has the attribute
            `_tutel_expert`.
        result_func: applied to the output, whose attribute `l_aux` is the balance loss.
        group: process group that shares the experts; None: torch's default group.
        seeds: up to three numbers. The first is the seed of the layer's weights, which do not depend on the number of
            ranks; the third is passed to `torch.manual_seed` afterwards.
        a2a_ffn_overlap_degree: accepted; see `expertmesh.parallel` for overlap.
        is_postscore: False is not supported: routing weights multiply the experts' outputs.
        batch_prioritized_routing: tokens with the largest weights are served first.
        normalize_gate: for k > 1, routing weights sum to one.
        is_gshard_loss: the balance loss of GShard (first choices); False: importance and load, which needs gate_noise.
        parallel_type: "adaptive:r", "data", "model" or "auto": the starting `adaptive_r`.
        use_2dh: accepted; see `expertmesh.parallel` for the all-to-all.

    Raises:
        ConfigError: an argument breaks a rule, or has no counterpart.

    Example:
        >>> layer = moe_layer(
        ...     gate_type={"type": "top", "k": 2},
        ...     model_dim=64,
        ...     experts={"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 128},
        ... )
        >>> y = layer(torch.randn(2, 16, 64))
        >>> loss = y.square().mean() + 0.01 * y.l_aux
    """

    def __init__(
        self,
        gate_type: Mapping[str, Any] | list[Mapping[str, Any]] | str,
        model_dim: int,
        experts: Mapping[str, Any] | None = None,
        scan_expert_func: Callable[[str, nn.Parameter], None] | None = None,
        result_func: Callable[[Tensor], Tensor] | None = None,
        group: Any = None,
        seeds: tuple[int | None, ...] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
    ) -> None:
        super().__init__()
        gate, expert = _gate(gate_type), _expert(experts, model_dim)
        if not is_postscore:
            raise ConfigError(
                "is_postscore=False: routing weights multiply the experts' results here; leave it out"
            )
        world = World(group) if dist.is_initialized() else None
        self._num_ranks = 1 if world is None else world.size
        count = expert.pop("count")
        self.num_global_experts = (
            count * self._num_ranks if count > 0 else self._num_ranks // -count
        )
        if count < 0 and self._num_ranks % -count:
            raise ConfigError(
                f"num_experts_per_device={count}: {-count} devices share an expert, which must divide the {self._num_ranks} "
                "ranks; choose a divisor"
            )
        self.sharded_count = max(-count, 1)
        factor = abs(gate.get("capacity_factor", 1.0)) or None
        k, noise = int(gate.get("k", 1)), float(gate.get("gate_noise", 0.0))
        if not is_gshard_loss and noise <= 0:
            raise ConfigError(
                "is_gshard_loss=False: the load of an expert needs gate_noise above 0; set it in gate_type"
            )
        self._biased = expert.pop("biased")
        cosine = {"cosine_dim": gate.get("proj_dim", 256)} if gate["type"] == "cosine_top" else {}
        self._layer = MoELayer(
            dim=model_dim,
            num_experts=self.num_global_experts,
            top_k=k,
            router="cosine" if cosine else "topk",
            normalize_weights="topk" if k > 1 and normalize_gate else "none",
            router_noise="gaussian" if noise > 0 else "none",
            router_noise_std=noise / self.num_global_experts if noise > 0 else 1.0,
            capacity_factor=factor,
            eval_capacity_factor=factor,
            min_capacity=1,
            drop_policy="priority" if batch_prioritized_routing else "first",
            balance_loss="gshard" if is_gshard_loss else "importance_load",
            # Tutel's variances divide by E - 1, ours by E
            aux_loss_weight=1.0 if is_gshard_loss else _unbiased(self.num_global_experts),
            seed=None if not seeds else seeds[0],
            **cosine,
            **expert,
        )
        if cosine and gate.get("init_t", 0.5) != 0.5:
            with torch.no_grad():
                self._layer.router.get_parameter("log_scale").fill_(
                    -torch.tensor(float(gate["init_t"])).log()
                )
        for has_bias, bias in zip(self._biased, ("b_in", "b_out"), strict=True):
            if any(self._biased) and not has_bias:  # stays zero
                self._layer.experts.get_parameter(bias).requires_grad_(False)
        self.result_func = result_func
        self._l_aux: Tensor | None = None
        self._dispatch_count: Tensor | None = None
        if world is not None:
            spread_experts(self._layer, world, es_degree=self.sharded_count if count < 0 else None)
        self.valid_rs = [0] + [
            r for r in range(1, self.sharded_count + 1) if self.sharded_count % r == 0
        ]
        self.adaptive_degree = self._starting_r(parallel_type)
        for name, parameter in self._layer.experts.named_parameters():
            parameter._tutel_expert = True  # type: ignore[attr-defined]
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)
        if seeds is not None and len(seeds) > 2 and seeds[2] is not None:
            torch.manual_seed(seeds[2])
        self.register_state_dict_post_hook(_to_theirs)
        self.register_load_state_dict_pre_hook(_to_ours)
        self.register_load_state_dict_pre_hook(keep_where_refused)

    def _starting_r(self, parallel_type: str) -> int:
        named = {"data": 1, "auto": 1, "model": self.sharded_count}
        if parallel_type in named:
            return named[parallel_type]
        kind, _, r = parallel_type.partition(":")
        if kind != "adaptive" or not r.isdigit():
            raise ConfigError(
                f"parallel_type={parallel_type!r}: must be 'adaptive:r', 'data', 'model' or 'auto'; choose one"
            )
        return min(int(r), self.sharded_count)

    def __getstate__(self) -> dict[str, Any]:
        """State for copying and saving, without the loss of the last call, which references autograd's graph."""
        return self.__dict__ | {"_l_aux": None, "_dispatch_count": None}

    @property
    def l_aux(self) -> Tensor | None:
        """Balance loss of the last call, or None."""
        return self._l_aux

    @property
    def dispatch_count(self) -> Tensor | None:
        """Choices per expert in the last call, before dropping, (E,) int64, or None."""
        return self._dispatch_count

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of the gate or of this rank's experts.

        Args:
            param_type: "gate" or "local_experts".

        Raises:
            ConfigError: param_type has another value.
        """
        parts = {"gate": self._layer.router, "local_experts": self._layer.experts}
        if param_type not in parts:
            raise ConfigError(
                f"param_type={param_type!r}: must be 'gate' or 'local_experts'; choose one"
            )
        return parts[param_type].named_parameters()

    def forward(
        self,
        input: Tensor,
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Tensor:
        """Route every token through its experts; arguments apply to this call only.

        Args:
            input: (..., D).
            gate_index: 0; there is one gate.
            capacity_factor: see `gate_type`; None: from `gate_type`.
            top_k: experts per token; None: from `gate_type`.
            a2a_ffn_overlap_degree: accepted.
            reserve_dims: 1.
            inequivalent_tokens: accepted; ranks may always have different numbers of tokens.
            adaptive_r: 0: tokens stay and weights are gathered; r: tokens are sent to r groups of slices of every
                expert.
            megablocks_size: accepted; rows are never padded.

        Returns:
            (..., D), with the attribute `l_aux`.

        Raises:
            ConfigError: an argument does not fit the layer.
        """
        if gate_index != 0 or reserve_dims != 1:
            raise ConfigError(
                f"gate_index={gate_index}, reserve_dims={reserve_dims}: there is one gate, and a token is one dimension; use 0 and 1"
            )
        factor = None if capacity_factor is None else abs(capacity_factor) or float("inf")
        y, stats = self._layer(
            input, top_k=top_k, capacity_factor=factor, route_degree=self._route_degree(adaptive_r)
        )
        self._l_aux, self._dispatch_count = stats.aux_loss, stats.num_tokens_per_expert_E
        y.l_aux = stats.aux_loss
        if self.result_func is not None:
            y = self.result_func(y)
            y.l_aux = stats.aux_loss  # type: ignore[attr-defined]
        return y

    def _route_degree(self, adaptive_r: int | None) -> int | None:
        """Route degree for Tutel's r; None on one process."""
        r = self.adaptive_degree if adaptive_r is None else adaptive_r
        check_choice("adaptive_r", r, self.valid_rs)
        if self._num_ranks == 1:
            return None
        return 1 if r == 0 else self._num_ranks // self.sharded_count * r


moe_layer = MOELayer


def _unbiased(num_experts: int) -> float:
    return num_experts / max(num_experts - 1, 1)


def _gate(gate_type: Mapping[str, Any] | list[Mapping[str, Any]] | str) -> dict[str, Any]:
    if isinstance(gate_type, str) and (named := re.fullmatch("Top([0-9]+)Gate", gate_type)):
        gate_type = {"type": "top", "k": int(named[1])}
    if isinstance(gate_type, list) and len(gate_type) == 1:
        gate_type = gate_type[0]
    if not isinstance(gate_type, Mapping) or gate_type.get("type") not in _GATES:
        raise ConfigError(
            f"gate_type={gate_type!r}: must be one dictionary with type 'top' or 'cosine_top'; for a gate of your own use "
            "expertmesh.MoELayer(router=module)"
        )
    _refuse_unknown("gate_type", gate_type, _GATES[gate_type["type"]])
    return dict(gate_type)


def _expert(experts: Mapping[str, Any] | None, model_dim: int) -> dict[str, Any]:
    """Arguments of the layer for the experts, and `count`, the number of experts per device."""
    experts = experts or {}
    kind = experts.get("type")
    if kind not in ("ffn", "llama_ffn"):
        raise ConfigError(
            f"experts has type {kind!r}: must be 'ffn' or 'llama_ffn'; for experts of your own use expertmesh.MoELayer(experts=...)"
        )
    known = _FFN if kind == "ffn" else _LLAMA
    _refuse_unknown("experts", experts, known | set(_COUNT_NAMES))
    if "hidden_size_per_expert" not in experts:
        raise ConfigError("experts has no hidden_size_per_expert; give the experts' hidden size")
    if experts.get("output_dim") not in (None, model_dim):
        raise ConfigError(
            f"experts has output_dim {experts['output_dim']}: experts give back the {model_dim} numbers of a token; leave it out"
        )
    count = next((experts[name] for name in _COUNT_NAMES if name in experts), 1)
    count = -round(1 / count) if isinstance(count, float) and 0 < count < 1 else int(count)
    if count == 0:
        raise ConfigError("num_experts_per_device=0: must be positive, or negative; use 1")
    default = nn.functional.relu if kind == "ffn" else nn.functional.silu
    name = match_activation(experts.get("activation_fn") or default)
    gated = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
    if name is None or (kind == "llama_ffn" and name not in gated):
        raise ConfigError(
            "experts has an activation_fn that is none of silu, gelu (exact), relu and relu squared; use one of these, or "
            "expertmesh.MoELayer(experts=...)"
        )
    biased = (experts.get("has_fc1_bias", True), experts.get("has_fc2_bias", True))
    biased = biased if kind == "ffn" else (False, False)
    return {
        "hidden_dim": experts["hidden_size_per_expert"],
        "activation": name if kind == "ffn" else gated[name],
        "bias": any(biased),
        "count": count,
        "biased": biased,
    }


def _refuse_unknown(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known - {"type"}):
        raise ConfigError(
            f"{what} has {unknown[0]!r}, which has no counterpart here; known are {', '.join(sorted(known))}"
        )


def _names(layer: MOELayer) -> list[ForeignName]:
    """Tutel's names of all tensors of the layer."""
    if layer._layer.options.router_kind == "cosine":
        found = [
            ForeignName("gates.0.temperature", "router.log_scale"),
            ForeignName("gates.0.cosine_projector.weight", "router.proj.weight"),
            ForeignName("gates.0.sim_matrix", "router.expert_embeddings", transposed=True),
        ]
    else:
        found = [ForeignName("gates.0.wg.weight", "router.proj.weight")]
    every: slice = slice(None)
    if str(layer._layer.experts.activation).endswith("glu"):
        return [
            *found,
            ForeignName("experts.W_fc1", "experts.w_in", (every, 0), transposed=True),
            ForeignName("experts.W_fc2", "experts.w_in", (every, 1), transposed=True),
            ForeignName("experts.W_fc3", "experts.w_out", transposed=True),
        ]
    found.append(ForeignName("experts.batched_fc1_w", "experts.w_in", (every, 0)))
    found.append(ForeignName("experts.batched_fc2_w", "experts.w_out", transposed=True))
    if layer._biased[0]:
        found.append(ForeignName("experts.batched_fc1_bias", "experts.b_in", (every, 0)))
    if layer._biased[1]:
        found.append(ForeignName("experts.batched_fc2_bias", "experts.b_out"))
    return found


def _to_theirs(layer: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(layer, MOELayer)
    if isinstance(layer._layer.dispatcher, LocalDispatcher):
        to_foreign(state, _names(layer), prefix=prefix, own_prefix="_layer.")
        state[f"{prefix}_num_global_experts"] = torch.tensor(layer.num_global_experts)


def _to_ours(layer: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    assert isinstance(layer, MOELayer)
    if not isinstance(layer._layer.dispatcher, LocalDispatcher):
        return
    state.pop(f"{prefix}_num_global_experts", None)
    bias = state.pop(f"{prefix}gates.0.cosine_projector.bias", None)
    if bias is not None and bool((bias != 0).any()):
        others[-1].append(
            f"{prefix}gates.0.cosine_projector.bias is not zero; the cosine router has no such bias"
        )
    others[-1].extend(
        from_foreign(state, _names(layer), layer._layer, prefix=prefix, own_prefix="_layer.")
    )
