"""Replacement for DeepSpeed's `MoE`: same signature, documented semantics, state dicts in both directions.

Change `from deepspeed.moe.layer import MoE` to `from expertmesh.integrations.deepspeed import MoE`; DeepSpeed itself is
not needed. Where it is imported, `deepspeed.initialize` takes these layers for its own: it finds them, spreads their
experts, reduces their gradients and saves them. Where DeepSpeed's code differs from its documentation, this module
follows the documentation:

* random token selection, jitter and sampling of the second expert apply in training only; evaluation is deterministic;
* without random token selection the first tokens are kept (DeepSpeed keeps arbitrary ones);
* `drop_tokens=False` drops nothing and pads nothing;
* fewer tokens than `min_capacity`, no tokens, and k > 2 work; `used_token` counts for every k, in losses and results.
"""

import copy
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from expertmesh.comm.world import World
from expertmesh.config.moe_rules import DropPolicy, RouterNoise
from expertmesh.config.no_counterpart import RefusedAttributes
from expertmesh.config.values import check_type
from expertmesh.errors import ConfigError
from expertmesh.integrations.deepspeed.rules import check_arguments, check_used
from expertmesh.moe.experts import FirstOutput, GroupedExperts
from expertmesh.moe.foreign_names import ForeignName, from_foreign, keep_where_refused, to_foreign
from expertmesh.moe.kept_marks import KeptMarks, hook_gradient
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.match_mlp import MatchedMLP, match_mlp
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.experts.dispatcher import spread_experts
from expertmesh.parallel.experts.owned import refuse_engine

_EXPERTS = "deepspeed_moe.experts.deepspeed_experts"


_TIMES = ("timers", "wall_clock_breakdown", "gate_time", "time_falltoall", "time_salltoall", "time_moe")
_TIMED = dict.fromkeys(_TIMES, "measure phases with torch.profiler")


class GateOptions(RefusedAttributes, SimpleNamespace):
    """Options that a layer routes by, under the names that DeepSpeed's gate has, with the linear map `wg`."""

    refused = _TIMED | {"ep_group": "read deepspeed_moe.ep_group"}


class RefusingGrouped(RefusedAttributes, GroupedExperts):
    """Grouped experts whose attributes that DeepSpeed alone has say what to use instead."""

    refused = {
        "deepspeed_experts": "weights of all experts are in `w_in`, `w_out`, `b_in` and `b_out`, whose first "
        "dimension counts experts; give MoE a module of another form to have modules"
    }


class DeepSpeedLayer(KeptMarks, RefusedAttributes, MoELayer):
    """The layer with router and experts, with what DeepSpeed's `deepspeed_moe` has beside them."""

    refused = _TIMED
    ep_group_name: str  # DeepSpeed's name for it
    use_tutel: bool = False
    gate: GateOptions  # its options and linear map
    ep_size: int  # ranks that share one replica of the experts
    num_local_experts: int  # experts of a rank
    l_aux: Tensor | None = None  # balance loss of the last call
    exp_counts: Tensor | None = None  # (E,) choices per expert in the last call, before dropping

    @property
    def ep_group(self) -> dist.ProcessGroup | None:
        """The ranks that share one replica of the experts; None: this process has all of them."""
        storage = getattr(self.dispatcher, "storage", None)
        return None if storage is None else storage.owners.process_group or dist.group.WORLD

    def __getstate__(self) -> dict[str, Any]:
        """State for copying and saving, without the last call, whose loss references autograd's graph."""
        return self.__dict__ | {"l_aux": None, "exp_counts": None}


class MoE(nn.Module):
    """MoE layer with the interface of `deepspeed.moe.layer.MoE`.

    An `expert` of two nn.Linear, or of three with a gate, becomes grouped experts that one operator computes; any other
    module is copied `num_experts` times. Experts start equal, as in DeepSpeed. `state_dict` uses DeepSpeed's names
    (`deepspeed_moe.gate.wg.weight`, `deepspeed_moe.experts.deepspeed_experts.0...`, `mlp...`, `coefficient...`) until
    the experts are sharded over ranks; under DeepSpeed's engine also then, where each rank's experts count from 0.

    Args:
        hidden_size: size of a token (D).
        expert: the module that is copied; it maps (n, D) to (n, D), or to a tuple whose first entry is (n, D).
        num_experts: E, over all ranks.
        ep_size: ranks that share one replica of the experts, from `set_deepspeed_parallelism` on.
        k: experts per token. k = 1 weighs by the probability, k > 1 divides by the sum over the kept choices.
        capacity_factor: rows per expert as a ratio of the even share, in training.
        eval_capacity_factor: capacity factor in evaluation.
        min_capacity: minimum rows per expert.
        use_residual: y = a MoE(x) + b expert(x) with (a, b) a learned softmax (PR-MoE, arXiv 2201.05596).
        noisy_gate_policy: None, "Jitter" (the router's input times 1 +- 0.01) or "RSample" (Gumbel noise on the choice;
            no effect for k above 1, as there).
        drop_tokens: False: no capacity.
        use_rts: random token selection for k = 1. Otherwise the first tokens are kept (k = 2), or the tokens with the
            largest weights (k > 2).
        use_tutel: no effect.
        enable_expert_tensor_parallelism: ranks that would hold copies of an expert hold slices of it instead; not under
            DeepSpeed's engine.
        top2_2nd_expert_sampling: for k = 2 in training, choose the second expert with Gumbel noise.

    Raises:
        ConfigError: an argument breaks a rule.

    Example:
        >>> expert = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> moe = MoE(64, expert, num_experts=8, k=1)
        >>> y, l_aux, exp_counts = moe(torch.randn(2, 16, 64))
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        _refuse_parted_at_birth()
        _join_theirs()
        nn.Module.__init__(self)
        if isinstance(num_experts, (list, tuple)):
            raise ConfigError(f"num_experts={num_experts!r}: must be one number; build one MoE per layer of a pyramid")
        check_arguments(
            hidden_size=hidden_size,
            expert=expert,
            num_experts=num_experts,
            ep_size=ep_size,
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            use_residual=use_residual,
            noisy_gate_policy=noisy_gate_policy,
            drop_tokens=drop_tokens,
            use_rts=use_rts,
            use_tutel=use_tutel,
            enable_expert_tensor_parallelism=enable_expert_tensor_parallelism,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        if num_experts % ep_size:
            raise ConfigError(f"ep_size={ep_size}: must divide num_experts={num_experts}; choose a divisor")
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        self.num_experts, self.ep_size, self.k = num_experts, ep_size, k
        self.use_residual = use_residual
        self.num_local_experts = num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self._mlp = _recognized(expert, hidden_size)
        weight = next(expert.parameters(), torch.empty(0))
        self.deepspeed_moe = DeepSpeedLayer(
            dim=hidden_size,
            hidden_dim=self._mlp.hidden_dim if self._mlp else hidden_size,
            num_experts=num_experts,
            top_k=k,
            experts=None if self._mlp else lambda _: FirstOutput(copy.deepcopy(expert)),
            activation=self._mlp.activation if self._mlp else "gelu",
            bias=bool(self._mlp and self._mlp.bias),
            normalize_weights="none" if k == 1 else "kept" if drop_tokens else "topk",
            capacity_factor=capacity_factor if drop_tokens else None,
            eval_capacity_factor=eval_capacity_factor if drop_tokens else None,
            min_capacity=min_capacity,
            drop_policy=_drop_policy(k, use_rts),
            input_jitter=0.01 if noisy_gate_policy == "Jitter" else 0.0,
            router_noise=_noise(k, noisy_gate_policy, top2_2nd_expert_sampling),
            balance_loss="gshard" if k == 2 else "switch",
            aux_loss_weight=1.0,
            device=weight.device,
            dtype=weight.dtype if weight.is_floating_point() else None,
        )
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2, device=weight.device, dtype=weight.dtype)
        self._name_modules()
        self._fill(expert)
        for parameter in self._layer.experts.parameters():
            self._tag(parameter)
        self.deepspeed_moe.ep_size, self.deepspeed_moe.ep_group_name = ep_size, self.expert_group_name
        self.deepspeed_moe.num_local_experts = self.num_local_experts
        self.deepspeed_moe.gate = GateOptions(
            wg=self._layer.router.proj,
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noisy_gate_policy=noisy_gate_policy,
            drop_tokens=drop_tokens,
            use_rts=use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.register_state_dict_post_hook(_to_theirs)
        self.register_load_state_dict_pre_hook(_to_ours)
        self.register_load_state_dict_pre_hook(keep_where_refused)

    @property
    def _layer(self) -> "DeepSpeedLayer":
        """The layer with the experts, under the name that DeepSpeed has for its own."""
        return self.deepspeed_moe

    def _name_modules(self) -> None:
        """Give the experts the names that DeepSpeed has for their number and, where they are modules, their list."""
        self._layer.experts.num_local_experts = self.num_local_experts  # type: ignore[assignment]
        if self._mlp is not None:
            self._layer.experts.__class__ = RefusingGrouped
        else:
            modules = [wrapper.get_submodule("expert") for wrapper in self._layer.experts.children()]
            self._layer.experts.deepspeed_experts = modules  # type: ignore[assignment]

    def _fill(self, expert: nn.Module) -> None:
        """Copy the weights of the module to every expert."""
        if self._mlp is None:
            return
        experts = dict(self._layer.experts.named_parameters())
        with torch.no_grad():
            for name, values in zip(_FUSED, self._mlp.weights(expert), strict=True):
                if values is not None:
                    experts[name].copy_(values.expand_as(experts[name]))

    def _tag(self, parameter: nn.Parameter) -> None:
        """Set the attributes by which DeepSpeed's engine and optimizers recognize expert parameters."""
        parameter.allreduce = False  # type: ignore[attr-defined]
        parameter.group_name = self.expert_group_name  # type: ignore[attr-defined]

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Shard the experts over torch.distributed's ranks: each group of `ep_size` ranks holds a replica.

        Gradients of experts are then averaged over all ranks, as data parallelism averages other gradients. Call it
        once, on every rank, before the optimizer is built. Without a process group, or with one rank, it does nothing.
        `deepspeed.initialize` calls it itself. Where DeepSpeed's communication is initialized, parameters stay the
        objects that an optimizer may have, and gradients are left to its engine, as by DeepSpeed's own layer.

        Args:
            use_data_before_expert_parallel_: replicas of an expert on neighbouring ranks; not supported, see
                `expert_order`.

        Raises:
            ConfigError: `ep_size` does not divide the ranks, the experts are spread already, DeepSpeed cannot find this
                layer, or its engine splits models or sequences over ranks.
        """
        if use_data_before_expert_parallel_:
            raise ConfigError(
                "use_data_before_expert_parallel_=True: ranks that share a copy of the experts are neighbours here; "
                "leave it out, or spread the layer with expertmesh.parallel and a world of another order"
            )
        has_engine = _has_engine()
        if (spread := getattr(self._layer.dispatcher, "storage", None)) is not None:
            if not (has_engine and spread.plain):
                refuse_engine(spread.layer)
            return
        if has_engine:
            _share_groups(self)
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return
        if dist.get_world_size() % self.ep_size:
            raise ConfigError(
                f"ep_size={self.ep_size}: must divide the {dist.get_world_size()} ranks; choose a divisor"
            )
        device = next(self.parameters()).device.type
        world = World(device_type=device)
        copies = world.size // self.ep_size
        if self.enable_expert_tensor_parallelism and self._mlp is not None and copies > 1:
            spread_experts(self._layer, world, es_degree=copies)
        else:
            spread_experts(self._layer, world, num_replicas=copies, plain=has_engine)
        self._name_modules()
        for parameter in self._layer.experts.parameters():
            self._tag(parameter)
            if not has_engine:
                hook_gradient(parameter, partial(torch.div, other=world.size))

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route every token through its experts.

        Args:
            hidden_states: (..., D).
            used_token: one number per token, in any shape; 0 for padding, which is not routed.

        Returns:
            The output, of the input's shape; the balance loss, 1.0 for uniform routing; and (E,) int64, the choices per
            expert before dropping.

        Raises:
            ConfigError: the input does not fit the layer.
        """
        mask = None
        check_type("hidden_states", hidden_states, Tensor, "a tensor")
        check_used(used_token, hidden_states.shape[:-1].numel())
        if used_token is not None:
            mask = used_token.reshape(hidden_states.shape[:-1]) != 0
        layer = self._layer
        y, stats = layer(hidden_states, token_mask=mask)
        layer.l_aux, layer.exp_counts = stats.aux_loss, stats.num_tokens_per_expert_E
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            mix = self.coefficient(hidden_states)
            mix = torch.softmax(mix, -1, dtype=accumulate_dtype(mix.dtype))
            y = (y * mix[..., :1] + dense * mix[..., 1:]).to(y.dtype)
        return y, layer.l_aux, layer.exp_counts


def _join_theirs() -> None:
    """Make `MoE` a subclass of DeepSpeed's, if DeepSpeed is imported: its engine finds layers by their class."""
    theirs = getattr(sys.modules.get("deepspeed.moe.layer"), "MoE", None)
    if theirs is not None and not issubclass(MoE, theirs):
        MoE.__bases__ = (theirs,)


def _refuse_parted_at_birth() -> None:
    """Raise ConfigError within `deepspeed.zero.Init`, which takes the values of a parameter away as soon as it is
    made."""
    parts = sys.modules.get("deepspeed.runtime.zero.partition_parameters")
    if parts is not None and parts.zero_init_context:
        raise ConfigError(
            "deepspeed.zero.Init: parts parameters as they are made, for ZeRO 3, which DeepSpeed has not for MoE; "
            "build the model outside of it and choose ZeRO stage 1 or 2, or shard all of it with "
            "expertmesh.parallelize"
        )


def _has_engine() -> bool:
    """Whether DeepSpeed's communication is initialized, which `deepspeed.initialize` does first."""
    comm = sys.modules.get("deepspeed.comm")
    return comm is not None and comm.is_initialized()


def _share_groups(moe: MoE) -> None:
    """Make DeepSpeed's process groups for `ep_size`, over which its engine reduces gradients of experts."""
    if not isinstance(moe, sys.modules["deepspeed.moe.layer"].MoE):
        raise ConfigError(
            "MoE was built before DeepSpeed was imported, which cannot find it; import deepspeed before the model is "
            "built"
        )
    groups = sys.modules["deepspeed.utils.groups"]
    ranks = dist.get_world_size()
    if groups._get_data_parallel_world_size() != ranks:
        raise ConfigError(
            f"mpu: splits the model over ranks, and each of the {ranks} ranks must have tokens of its own; leave it out"
        )
    if moe.enable_expert_tensor_parallelism and ranks > moe.ep_size:
        raise ConfigError(
            "enable_expert_tensor_parallelism=True: DeepSpeed's engine would average the slices of "
            f"{ranks // moe.ep_size} ranks; leave it out"
        )
    if groups._get_sequence_parallel_world_size() > 1:
        raise ConfigError(
            "sequence_parallel_size: MoE has no sequence parallelism under DeepSpeed's engine; leave it out"
        )
    if ranks % moe.ep_size == 0 and moe.expert_group_name not in groups._get_expert_parallel_group_dict():
        groups._create_expert_and_data_parallel(moe.ep_size)


_FUSED = ("w_in", "w_out", "b_in", "b_out")


def _drop_policy(k: int, use_rts: bool) -> DropPolicy:
    if k == 1:
        return "random" if use_rts else "first"
    return "first" if k == 2 else "weight"


def _noise(k: int, noisy_gate_policy: str | None, samples_second: bool) -> RouterNoise:
    if noisy_gate_policy == "RSample" and k == 1:
        return "gumbel"
    return "gumbel_after_first" if k == 2 and samples_second else "none"


def _recognized(expert: nn.Module, hidden_size: int) -> MatchedMLP | None:
    """Structure of the expert if grouped experts have the same parameters, else None."""
    mlp = match_mlp(expert)
    if mlp is not None and mlp.dim != hidden_size:
        raise ConfigError(
            f"hidden_size={hidden_size}: the expert takes tokens of {mlp.dim} numbers; give that, or another expert"
        )
    if mlp is None or len(mlp.biased) not in (0, len(mlp.in_names) + 1):
        return None
    return mlp


def _names(moe: MoE) -> list[ForeignName]:
    """DeepSpeed's names of all tensors that this rank has of the layer."""
    mlp, found = moe._mlp, [ForeignName("deepspeed_moe.gate.wg.weight", "router.proj.weight")]
    if mlp is None:
        for e, (number, expert) in enumerate(moe._layer.experts.named_children()):
            for n in expert.state_dict():
                theirs = f"{_EXPERTS}.{e}.{n.removeprefix('expert.')}"
                found.append(ForeignName(theirs, f"experts.{number}.{n}"))
        return found
    for e in range(len(moe._layer.experts.get_parameter("w_in"))):
        places = [(name, "in", (e, g)) for g, name in enumerate(mlp.in_names)]
        for name, side, part in [*places, (mlp.out_name, "out", (e,))]:
            found.append(ForeignName(f"{_EXPERTS}.{e}.{name}.weight", f"experts.w_{side}", part))
            if name in mlp.biased:
                found.append(ForeignName(f"{_EXPERTS}.{e}.{name}.bias", f"experts.b_{side}", part))
    return found


def _has_theirs(moe: MoE) -> bool:
    """Whether the state dict has DeepSpeed's names: whole experts, on this rank alone or under DeepSpeed's engine."""
    spread = getattr(moe._layer.dispatcher, "storage", None)
    return spread is None or bool(spread.plain)


def _to_theirs(moe: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    assert isinstance(moe, MoE)
    if _has_theirs(moe):
        to_foreign(state, _names(moe), prefix=prefix, own_prefix="deepspeed_moe.")


def _place_own_experts(moe: MoE, state: dict[str, Any], prefix: str) -> None:
    """Count the experts of a state dict over all ranks, if it has this rank's alone and the layer still has all."""
    begin, count = f"{prefix}{_EXPERTS}.", moe.num_local_experts
    given = {int(n.removeprefix(begin).split(".")[0]): 0 for n in state if n.startswith(begin)}
    is_whole = getattr(moe._layer.dispatcher, "storage", None) is None
    if not is_whole or not dist.is_initialized() or count == moe.num_experts or sorted(given) != [*range(count)]:
        return
    first = dist.get_rank() % moe.ep_size * count
    own = {n: state.pop(n) for n in list(state) if n.startswith(begin)}
    state |= {n: v for n, v in moe.state_dict(prefix=prefix).items() if n.startswith(begin)}
    for name, values in own.items():
        expert, _, rest = name.removeprefix(begin).partition(".")
        state[f"{begin}{first + int(expert)}.{rest}"] = values


def _to_ours(moe: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    assert isinstance(moe, MoE)
    if _has_theirs(moe):
        _place_own_experts(moe, state, prefix)
        others[-1].extend(from_foreign(state, _names(moe), moe._layer, prefix=prefix, own_prefix="deepspeed_moe."))
