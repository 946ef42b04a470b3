"""Replacement for Tutel's `moe_layer`: same signature, documented semantics, state dicts in both directions.

Where Tutel's code differs from its documentation, this module follows the documentation:

* arguments of a call apply to that call only; dictionaries that are passed in are not changed;
* gate noise affects the choice only, and has the scale that `load_importance_loss` assumes;
* dropless means that no token is dropped, also with batch-prioritized routing, and no row is padded;
* the backward pass of a process group other than the world uses that group;
* gated experts are correct for every `adaptive_r`, odd `model_dim` and empty batches work, missing experts are an
  error.
"""

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.comm.mesh import divisors
from expertmesh.comm.world import World
from expertmesh.config.no_counterpart import RefusedAttributes, line
from expertmesh.config.values import check_choice, check_type
from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import net
from expertmesh.integrations.tutel.builtin import EXPERTS, make_experts, make_gate
from expertmesh.integrations.tutel.custom_layer import CustomLayer
from expertmesh.integrations.tutel.padded import rows_per_expert, unbiased
from expertmesh.integrations.tutel.refused import refuse_switches
from expertmesh.integrations.tutel.rules import check_count, check_numbers, check_tokens
from expertmesh.integrations.tutel.state_names import to_ours, to_theirs
from expertmesh.moe.foreign_names import keep_where_refused
from expertmesh.moe.kept_marks import KeptMarks
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.match_mlp import match_activation
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.owned import check_left_alone, refuse_engine

_COUNT_NAMES = ("num_experts_per_device", "count_per_node", "local_experts")
_FFN = {"hidden_size_per_expert", "activation_fn", "activation_fn_with_self"}
_FFN |= {"has_fc1_bias", "has_fc2_bias", "output_dim"}
_LLAMA = {"hidden_size_per_expert", "activation_fn"}
_GATES = {
    "top": {"k", "fp32_gate", "capacity_factor", "gate_noise"},
    "cosine_top": {"k", "fp32_gate", "capacity_factor", "gate_noise", "proj_dim", "init_t"},
}


class GroupedGate(NamedTuple):
    """Options of the gate beside grouped experts, under Tutel's names; a call has arguments to change them."""

    top_k: int
    capacity_factor: float
    gate_noise: float
    fp32_gate: bool
    wg: nn.Linear | None
    """The map from tokens to logits; None: of type "cosine_top"."""


class MOELayer(KeptMarks, RefusedAttributes, nn.Module):
    """MoE layer with the interface of Tutel's `moe_layer`.

    If torch.distributed is initialised, the experts are sharded over the ranks of `group` at construction. The
    optimizer then sees each rank's shard, whose gradients are sums over all ranks (as in Tutel, do not all-reduce
    parameters that `scan_expert_func` was called with). `state_dict` uses Tutel's names, with this rank's experts as in
    Tutel's file of the rank, unless ranks share an expert.

    Args:
        gate_type: {"type": "top" or "cosine_top", "k", "capacity_factor", "gate_noise", "fp32_gate", "proj_dim"}, or
            {"type": "custom", "module": class, ...} with the class's arguments, or a list of these. k above E is E.
            capacity_factor above 0: rows per expert as a ratio of the even share; 0: dropless; below 0: at most that
            ratio.
        experts: {"type": "ffn" or "llama_ffn", "num_experts_per_device", "hidden_size_per_expert", "activation_fn",
            "has_fc1_bias", "has_fc2_bias", "output_dim"}, or {"type": "custom", "module": class, ...}; a negative
            number of experts per device is the number of devices per expert.
        scan_expert_func: called with the name and the parameter of each expert weight, which has the attribute
            `_tutel_expert`.
        result_func: applied to the output, whose attribute `l_aux` is the balance loss.
        seeds: up to three numbers: of the gate's weights, of this rank's experts (of type "ffn", of which a device has
            whole ones, and "custom"), and the one passed to `torch.manual_seed` afterwards. Weights are those that
            Tutel draws.
        a2a_ffn_overlap_degree: parts that tokens travel in between ranks, while experts compute on another part.
        is_gshard_loss: the balance loss of GShard (first choices); False: importance and load, which needs gate_noise.

    Example:
        >>> layer = moe_layer(
        ...     gate_type={"type": "top", "k": 2},
        ...     model_dim=64,
        ...     experts={"type": "ffn", "num_experts_per_device": 4, "hidden_size_per_expert": 128},
        ... )
        >>> y = layer(torch.randn(2, 16, 64))
        >>> loss = y.square().mean() + 0.01 * y.l_aux
    """

    refused = {
        "skip_moe": "leave the layer out of the model",
        "auto_parallel": "read `adaptive_degree`",
        "use_model_parallel": "read `adaptive_degree` and `sharded_count`",
        "protected_shape": "read the shape of the input",
        "megablocks_size": "rows are never padded",
    }

    def __init__(
        self,
        gate_type: Mapping[str, Any] | list[Mapping[str, Any]] | str,
        model_dim: int,  # size of a token (D)
        experts: Mapping[str, Any] | None = None,
        scan_expert_func: Callable[[str, nn.Parameter], None] | None = None,
        result_func: Callable[[Tensor], Tensor] | None = None,
        group: Any = None,  # process group that shares the experts; None: torch's default group
        seeds: tuple[int | None, ...] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,  # whether routing weights multiply the experts' outputs; False: their inputs
        batch_prioritized_routing: bool = False,  # tokens with the largest weights are served first
        normalize_gate: bool = True,  # for k > 1, routing weights sum to one
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",  # "adaptive:r", "data", "model" or "auto": the starting `adaptive_r`
        use_2dh: bool = False,  # the all-to-all in two steps, between nodes first
        **deprecated: Any,  # `pad_samples`, which has no effect
    ) -> None:
        super().__init__()
        refuse_switches()
        _refuse_unknown("moe_layer", deprecated, {"pad_samples"})
        if deprecated:
            logging.getLogger(__name__).warning("pad_samples has no effect; leave it out")
        check_numbers(model_dim=model_dim, a2a_ffn_overlap_degree=a2a_ffn_overlap_degree)
        check_type("seeds", seeds or (), (tuple, list), "a tuple of up to three numbers")
        gates, expert = _gates(gate_type), dict(experts or {})
        count = _count(expert)
        self.model_dim, self.num_local_experts = model_dim, max(count, 1)
        self.num_global_experts = self.global_expert_count(count, group)
        self._num_ranks, self.sharded_count = net.get_world_size(group), max(-count, 1)
        noises = [float(gate.get("gate_noise", 0.0)) for gate in gates]
        if not is_gshard_loss and min(noises) <= 0:
            raise ConfigError(
                "is_gshard_loss=False: the load of an expert needs gate_noise above 0; set it in gate_type"
            )
        options = {
            "is_postscore": is_postscore,
            "batch_prioritized_routing": batch_prioritized_routing or bool(int(os.environ.get("BATCH_PRIO") or 0)),
            "normalize_gate": normalize_gate,
            "is_gshard_loss": is_gshard_loss,
        }
        seeds = (*(seeds or ()), None, None, None)[:3]
        self.a2a_ffn_overlap_degree, self.use_2dh = a2a_ffn_overlap_degree, use_2dh
        self.result_func, self._group = result_func, group
        self.is_postscore, self.is_gshard_loss = is_postscore, is_gshard_loss
        self.normalize_gate = normalize_gate
        self.batch_prioritized_routing = options["batch_prioritized_routing"]
        self._told_gates = gates
        self._capacity_factor = float(gates[0].get("capacity_factor", 1.0))
        self._l_aux: Tensor | None = None
        self._dispatch_count: Tensor | None = None
        known = None if _is_custom(gates, expert, is_postscore) else _known_expert(expert, model_dim)
        self._layer: MoELayer | CustomLayer
        if known is None:
            _check_custom(expert)
            self._layer = CustomLayer(
                gates,
                expert,
                model_dim=model_dim,
                num_global_experts=self.num_global_experts,
                num_local_experts=max(count, 1),
                sharded_count=self.sharded_count,
                group=group,
                seeds=seeds,
                options=options,
            )
        else:
            self._biased = known.pop("biased")
            self._layer = _grouped(gates[0], known | {"seed": seeds[0]}, model_dim, self.num_global_experts, options)
            for has_bias, bias in zip(self._biased, ("b_in", "b_out"), strict=True):
                if any(self._biased) and not has_bias:  # stays zero
                    self._layer.experts.get_parameter(bias).requires_grad_(False)
            if dist.is_initialized():
                spread_experts(
                    self._layer,
                    World(group),
                    es_degree=self.sharded_count if count < 0 else None,
                    all_to_all="hierarchical" if use_2dh else "flat",
                    plain=True,
                )
        if self._num_ranks > 1:
            self._layer.set_deepspeed_parallelism = partial(  # type: ignore[assignment]
                refuse_engine, "moe_layer"
            )
        self.register_state_dict_post_hook(to_theirs)
        self.register_load_state_dict_pre_hook(to_ours)
        self.register_load_state_dict_pre_hook(keep_where_refused)
        if known is not None:
            self._draw(gates[0], expert, model_dim, count, seeds)
        self.valid_rs = [0, *divisors(self.sharded_count)]
        self.adaptive_degree = self._starting_r(parallel_type)
        self._mark_experts(scan_expert_func)
        if seeds[2] is not None:
            torch.manual_seed(seeds[2])

    def _mark_experts(self, scan_expert_func: Callable[[str, nn.Parameter], None] | None) -> None:
        for name, parameter in self._layer.experts.named_parameters():
            parameter._tutel_expert = True  # type: ignore[attr-defined]
            if scan_expert_func is not None:
                scan_expert_func(name, parameter)

    @staticmethod
    def global_expert_count(num_local_experts: float, group: Any = None) -> int:
        """Number of experts over all ranks.

        Args:
            num_local_experts: experts of a rank; -n or 1 / n: n ranks share an expert.
            group: the ranks; None: all.
        """
        count, ranks = check_count(num_local_experts), net.get_world_size(group)
        if count > 0:
            return count * ranks
        if ranks % -count:
            raise ConfigError(
                f"num_experts_per_device={count}: {-count} devices share an expert, which must divide the {ranks} "
                "ranks; choose a divisor"
            )
        return ranks // -count

    def _draw(
        self,
        gate: Mapping[str, Any],
        expert: Mapping[str, Any],
        model_dim: int,
        count: int,
        seeds: tuple[int | None, ...],
    ) -> None:
        """Load the weights that Tutel draws from these seeds: this rank's experts, then the gate."""
        drawn: dict[str, Tensor] = {}
        if seeds[1] is not None:
            experts = make_experts(expert, model_dim, max(count, 1), self.sharded_count, seed=seeds[1])
            drawn |= {f"experts.{n}": v for n, v in experts.state_dict().items()}
        if seeds[0] is not None:
            made = make_gate(gate, model_dim, self.num_global_experts, seed=seeds[0])
            drawn |= {f"gates.0.{n}": v for n, v in made.state_dict().items()}
        if drawn:
            self.load_state_dict(self.state_dict() | drawn)

    def _starting_r(self, parallel_type: str) -> int:
        named = {"data": 1, "auto": 1, "model": self.sharded_count}
        if parallel_type in named:
            return named[parallel_type]
        kind, _, r = parallel_type.partition(":")
        if kind != "adaptive" or not r.isdigit():
            raise ConfigError(
                f"parallel_type={parallel_type!r}: must be 'adaptive:r', 'data', 'model' or 'auto'; choose one"
            )
        check_choice("parallel_type's r", degree := min(int(r), self.sharded_count), self.valid_rs)
        return degree

    def __getstate__(self) -> dict[str, Any]:
        """State for copying and saving, without the loss of the last call, which references autograd's graph."""
        return self.__dict__ | {"_l_aux": None, "_dispatch_count": None}

    @property
    def l_aux(self) -> Tensor | None:
        """Balance loss of the last call, or None."""
        return self._l_aux

    @property
    def world_size(self) -> int:
        """Number of ranks that share the experts."""
        return self._num_ranks

    @property
    def group(self) -> Any:
        """The ranks that share the experts; None: all."""
        return self._group

    @property
    def experts(self) -> nn.Module:
        """The module with this rank's experts."""
        return self._layer.experts

    @property
    def gates(self) -> Any:
        """Modules of the gates; beside grouped experts the one gate's options, read only, and its linear map `wg`."""
        if isinstance(self._layer, CustomLayer):
            return self._layer.gates
        gate, router = self._told_gates[0], self._layer.router
        return [
            GroupedGate(
                top_k=self._layer.options.top_k,
                capacity_factor=self._capacity_factor,
                gate_noise=float(gate.get("gate_noise", 0.0)),
                fp32_gate=bool(gate.get("fp32_gate", False)),
                wg=getattr(router, "proj", None),
            )
        ]

    @property
    def dispatch_count(self) -> Tensor | None:
        """Choices per expert in the last call, before dropping, (E,) int64, or None."""
        return self._dispatch_count

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of the gate or of this rank's experts. `param_type`: "gate" or "local_experts"."""
        layer = self._layer
        gate: nn.Module = layer.gates if isinstance(layer, CustomLayer) else layer.router
        parts = {"gate": gate, "local_experts": layer.experts}
        if param_type not in parts:
            raise ConfigError(f"param_type={param_type!r}: must be 'gate' or 'local_experts'; choose one")
        return parts[param_type].named_parameters()

    def forward(
        self,
        input: Tensor,  # (..., D)
        gate_index: int = 0,  # number of the gate
        capacity_factor: float | None = None,  # see `gate_type`; None: from `gate_type`
        top_k: int | None = None,  # experts per token; None: from `gate_type`
        a2a_ffn_overlap_degree: int | None = None,  # see `MOELayer`; None: the layer's
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,  # accepted; ranks may always have different numbers of tokens
        adaptive_r: int | None = None,
        megablocks_size: int = 0,  # accepted; rows are never padded
    ) -> Tensor:
        """Route every token through its experts; arguments apply to this call only.

        Args:
            reserve_dims: dimensions of a token, at the end of the input's shape; above 1 for experts of type "custom".
            adaptive_r: 0: tokens stay and weights are gathered; r: tokens are sent to r groups of slices of every
                expert.

        Returns:
            (..., D), with the attribute `l_aux`.
        """
        check_numbers(
            capacity_factor=capacity_factor,
            top_k=top_k,
            a2a_ffn_overlap_degree=a2a_ffn_overlap_degree,
            megablocks_size=megablocks_size,
            reserve_dims=reserve_dims,
        )
        check_tokens(input, self.model_dim, reserve_dims)
        r = self.adaptive_degree if adaptive_r is None else adaptive_r
        check_choice("adaptive_r", r, self.valid_rs)
        layer = self._layer
        if self._num_ranks > 1:
            check_left_alone(layer.experts, layer="moe_layer")
        overlap = a2a_ffn_overlap_degree or self.a2a_ffn_overlap_degree
        alignment = _alignment(self.sharded_count * overlap, self._block(megablocks_size))
        if isinstance(layer, CustomLayer):
            check_choice("gate_index", gate_index, range(len(layer.gates)))
            y, loss, counts = layer(
                input,
                gate_index=gate_index,
                top_k=top_k,
                capacity_factor=capacity_factor,
                reserve_dims=reserve_dims,
                inequivalent_tokens=inequivalent_tokens,
                adaptive_r=r,
                alignment=alignment,
            )
        else:
            check_choice("gate_index", gate_index, [0])
            check_choice("reserve_dims", reserve_dims, [1])
            num_tokens = input.shape[:-1].numel()
            if inequivalent_tokens:
                most = torch.tensor(num_tokens, device=input.device)
                num_tokens = int(net.simple_all_reduce(most, self._group, dist.ReduceOp.MAX))
            k = min(top_k or layer.options.top_k, self.num_global_experts)
            factor = self._capacity_factor if capacity_factor is None else capacity_factor
            rows = rows_per_expert(num_tokens, self.num_global_experts, k, factor, alignment)
            y, loss, counts = self._call_grouped(layer, input, k, rows if factor else None, overlap, r)
        self._l_aux, self._dispatch_count = loss, counts
        y.l_aux = self._l_aux
        if self.result_func is not None:
            y = self.result_func(y)
            if isinstance(y, Tensor):
                y.l_aux = self._l_aux  # type: ignore[attr-defined]
        return y

    def _call_grouped(
        self, layer: MoELayer, x: Tensor, k: int, rows: int | None, overlap: int, r: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output, balance loss and choices per expert of the grouped layer; rows: of an expert, None: as many as
        come."""
        travels = {}
        if self._num_ranks > 1:
            degree = 1 if r == 0 else self._num_ranks // self.sharded_count * r
            travels = {"route_degree": degree, "overlap_degree": overlap}
        factor = float("inf")
        if rows is not None:  # the layer rounds up
            even = max(k * x.shape[:-1].numel(), 1) / self.num_global_experts
            factor = max(rows - 0.5, 0.5) / even
        y, stats = layer(x, top_k=k, capacity_factor=factor, **travels)
        return y, stats.aux_loss, stats.num_tokens_per_expert_E

    def _block(self, megablocks_size: int) -> int:
        """Rows of a block of Tutel's block-sparse inference; 1 where it has none."""
        alone = self._num_ranks == 1 and self.num_global_experts > 1
        return megablocks_size if alone and megablocks_size and not torch.is_grad_enabled() else 1


moe_layer = MOELayer


def _alignment(least: int, block: int) -> int:
    """Number that Tutel makes the rows of an expert a multiple of."""
    alignment = -(-least // block) * block
    return alignment if alignment <= 256 else -(-alignment // 128) * 128


def _gates(gate_type: Mapping[str, Any] | list[Mapping[str, Any]] | str) -> list[dict[str, Any]]:
    """The gates' dictionaries, with a capacity factor."""
    if isinstance(gate_type, str) and (named := re.fullmatch("Top([0-9]+)Gate", gate_type)):
        gate_type = {"type": "top", "k": int(named[1])}
    gates: list[Any] = gate_type if isinstance(gate_type, list) else [gate_type]
    for gate in gates or [None]:
        kind = gate.get("type") if isinstance(gate, Mapping) else None
        if kind == "custom" and callable(gate.get("module")):
            continue
        if kind not in _GATES:
            raise ConfigError(
                f"gate_type={gate!r}: must be a dictionary with type 'top', 'cosine_top', or 'custom' with a module; "
                "give one"
            )
        _refuse_unknown("gate_type", gate, _GATES[kind])
        check_numbers(**{name: value for name, value in gate.items() if name != "type"})
    default = {"capacity_factor": float(os.environ.get("CAP_FACTOR") or 1.0)}
    return [dict(g) if g["type"] == "custom" else default | dict(g) for g in gates]


def _count(expert: dict[str, Any]) -> int:
    """Take the number of experts per device out of the dictionary."""
    given = [expert.pop(name) for name in _COUNT_NAMES if name in expert]
    return check_count(given[0] if given else 1)


def _is_custom(gates: list[dict[str, Any]], expert: Mapping[str, Any], is_postscore: bool) -> bool:
    """Whether the layer has parts that grouped experts and our routers have not."""
    return len(gates) > 1 or gates[0]["type"] == "custom" or expert.get("type") == "custom" or not is_postscore


def _check_custom(expert: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the experts can be built in Tutel's form."""
    if expert.get("type") != "custom":
        _known_expert(expert, None)
    elif not callable(expert.get("module")):
        raise ConfigError(
            "experts has type 'custom' and no module; give a class, or use expertmesh.MoELayer(experts=...)"
        )


def _known_expert(expert: Mapping[str, Any], model_dim: int | None) -> dict[str, Any] | None:
    """Arguments of the layer for grouped experts; None: their form is another."""
    kind = expert.get("type")
    if kind not in EXPERTS:
        raise ConfigError(
            f"experts has type {kind!r}: must be 'ffn', 'llama_ffn', or 'custom' with a module; choose one"
        )
    known = _FFN if kind == "ffn" else _LLAMA
    _refuse_unknown("experts", expert, known | set(_COUNT_NAMES))
    check_numbers(**{name: value for name, value in expert.items() if name != "type"})
    for option in ("activation_fn", "activation_fn_with_self"):
        if expert.get(option) is not None and not callable(expert[option]):
            raise ConfigError(f"{option}={expert[option]!r}: must be a function; for example torch.nn.functional.relu")
    if "hidden_size_per_expert" not in expert:
        raise ConfigError("experts has no hidden_size_per_expert; give the experts' hidden size")
    default = nn.functional.relu if kind == "ffn" else nn.functional.silu
    name = match_activation(expert.get("activation_fn") or default)
    gated = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
    if kind == "llama_ffn" and name not in gated:
        return None
    other_dim = expert.get("output_dim") not in (None, model_dim)
    if name is None or other_dim or expert.get("activation_fn_with_self") is not None:
        return None
    biased = (expert.get("has_fc1_bias", True), expert.get("has_fc2_bias", True))
    biased = biased if kind == "ffn" else (False, False)
    return {
        "hidden_dim": expert["hidden_size_per_expert"],
        "activation": name if kind == "ffn" else gated[name],
        "bias": any(biased),
        "biased": biased,
    }


def _grouped(
    gate: Mapping[str, Any],
    expert: Mapping[str, Any],
    model_dim: int,
    num_experts: int,
    options: Mapping[str, bool],
) -> MoELayer:
    """The layer with grouped experts."""
    k, noise = min(int(gate.get("k", 1)), num_experts), float(gate.get("gate_noise", 0.0))
    cosine = gate["type"] == "cosine_top"
    return MoELayer(
        dim=model_dim,
        num_experts=num_experts,
        top_k=k,
        router=make_gate(gate, model_dim, num_experts, seed=None) if cosine else "topk",
        normalize_weights="topk" if k > 1 and options["normalize_gate"] else "none",
        router_noise="gaussian" if noise > 0 else "none",
        router_noise_std=noise / num_experts if noise > 0 else 1.0,
        min_capacity=1,
        drop_policy="priority" if options["batch_prioritized_routing"] else "first",
        balance_loss="gshard" if options["is_gshard_loss"] else "importance_load",
        aux_loss_weight=1.0 if options["is_gshard_loss"] else unbiased(num_experts),
        **expert,
    )


def _refuse_unknown(what: str, given: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(given) - known - {"type"}):
        raise ConfigError(line(f"{what} has {unknown[0]!r}, which", f"known are {', '.join(sorted(known))}"))
