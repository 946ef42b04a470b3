"""Sharding of a model over the ranks of an engine: dense modules over tensor groups, experts over all ranks.

The p ranks form p / L tensor groups of L neighbouring ranks. Each group serves its own sequences: its ranks have the
same tokens, and each has a part of the heads, the KV cache and the dense layers. Experts are sharded over all ranks, e
ways along E and f ways along F; `expertmesh.parallel.experts.coordinated` exchanges tokens with them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from expertmesh.comm.collectives import all_gather, gather_to_first
from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import divisors
from expertmesh.comm.start import start_group
from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError, named
from expertmesh.moe.layer import MoELayer, grouped_layers
from expertmesh.moe.module_adapters import refuse_adapters
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.parallel.experts.coordinated import (
    CoordinatedDispatcher,
    ServingGroups,
    StepSizes,
)
from expertmesh.parallel.ranks import backend_for
from expertmesh.parallel.tensor import distribute
from expertmesh.spec.feed_forward import MLP_CUT

_OF_ENGINES = ("tp_degree", "ep_degree", "es_degree", "timeout_s", "num_threads", "bind")
_EXPERT_AXES = {"w_in": 2, "w_out": 2, "b_in": 2, "w_in_scale": 2, "w_out_scale": 2}
"""Hidden-size axis of each expert tensor."""
ADDED_ONCE = ("b_out", "out.bias")
"""Biases that are added after a sum over slices, so on one rank only."""


@dataclass(frozen=True)
class ServingDegrees:
    """Parallel degrees of a model on p ranks."""

    num_ranks: int  # p
    tp: int  # L, ranks of a tensor group
    e: int  # parts of the experts
    # slices of each expert's hidden size. e f is p, or p / L if the ranks of a group have the same experts
    f: int

    @property
    def num_groups(self) -> int:
        """Number of tensor groups."""
        return self.num_ranks // self.tp

    @property
    def is_split(self) -> bool:
        """Whether a tensor group splits its tokens, because its ranks have the same experts."""
        return self.tp > 1 and self.e * self.f == self.num_groups

    @property
    def is_whole(self) -> bool:
        """Whether no product is cut, so that each has the bits of one process."""
        return self.tp == 1 and self.f == 1


def serving_degrees(
    config: ParallelConfig,
    *,
    num_ranks: int,
    num_experts: tuple[int, ...],
    hidden_dim: int,
    unit: int = 1,
) -> ServingDegrees:
    """Parallel degrees of a model that an engine serves; `unit` divides the hidden size of every slice, see
    `slice_unit`.

    If one of ep_degree and es_degree is unset, it follows from the other; if both are, experts get as few slices as
    possible.
    """
    for name, value in config.model_dump().items():
        if name not in _OF_ENGINES and value != ParallelConfig.model_fields[name].default:
            raise ConfigError(f"parallel.{name}", value, "is for training, not for an engine", "leave it out")
    tp = config.tp_degree
    if num_ranks % tp:
        near = max(d for d in divisors(num_ranks) if d <= tp)
        raise ConfigError("parallel.tp_degree", tp, f"must divide the {num_ranks} ranks", f"nearest: {near}")
    if not num_experts:
        for name in ("ep_degree", "es_degree"):
            if getattr(config, name):
                raise ConfigError(
                    f"parallel.{name}",
                    getattr(config, name),
                    "has no effect in a model without experts",
                    "leave it out",
                )
        return ServingDegrees(num_ranks, tp, 1, 1)
    if len(config.ep_degree) > 1:
        raise ConfigError("parallel.ep_degree", config.ep_degree, "is one number for an engine", "give one")
    fits = [
        (e, f)
        for total in {num_ranks, num_ranks // tp}
        for e in divisors(total)
        for f in (total // e,)
        if all(n % e == 0 for n in num_experts) and hidden_dim % (f if f == 1 else f * unit) == 0
    ]
    ep = config.ep_degree[0] if config.ep_degree else None
    wanted = [(e, f) for e, f in fits if ep in (None, e) and config.es_degree in (None, f)]
    if not wanted:
        shown = " and ".join(
            named(f"parallel.{name}", value)
            for name, value in (("ep_degree", ep), ("es_degree", config.es_degree))
            if value is not None
        )
        choices = ", ".join(f"{e} x {f}" for e, f in sorted(fits, reverse=True))
        raise ConfigError(
            f"{shown or 'experts'} on {num_ranks} ranks: parts of the {min(num_experts)} experts times slices of their "
            f"hidden_dim {hidden_dim}{f' in whole groups of {unit}' if unit > 1 else ''} must make the ranks; "
            f"{f'use ep_degree x es_degree of {choices}' if choices else 'use fewer ranks'}"
        )
    # first the most ranks with distinct experts, then the fewest slices
    e, f = max(wanted, key=lambda one: (one[0] * one[1], one[0]))
    return ServingDegrees(num_ranks, tp, e, f)


def slice_unit(model: nn.Module) -> int:
    """Number of hidden columns of which every slice of the experts must be a multiple, over all formats of a model."""
    slices = [experts.weights().slices()[0] for _, _, experts in grouped_layers(model)]
    return math.lcm(*(FORMATS[one.format].unit(one) for one in slices))


ONE_PROCESS = (
    "parallel: says how ranks share a model, and this is one process; start several with torchrun, or leave it out"
)


def world_of(config: ParallelConfig, *, device_type: str) -> World:
    """World of torch's default process group; the group is initialized if torchrun started this process."""
    if not dist.is_initialized():
        if not dist.is_torchelastic_launched():
            raise ConfigError(ONE_PROCESS)
        start_group(backend_for(device_type, on_host=True), timeout_s=config.timeout_s)
    return World(device_type=device_type, timeout_s=config.timeout_s)


def serving_groups(world: World, degrees: ServingDegrees) -> ServingGroups:
    """Process groups of this rank; every rank must call."""
    L, p = degrees.tp, degrees.num_ranks
    rows = [list(range(first, first + L)) for first in range(0, p, L)]
    columns = [list(range(place, p, L)) for place in range(L)]
    leaders = [columns[0], *([rank] for rank in range(p) if rank % L)]
    return ServingGroups(
        world.all_ranks(),
        world.group(columns, name="the ranks that exchange tokens"),
        world.group(rows, name="the ranks that share tokens"),
        world.group(leaders, name="the first ranks of all groups"),
    )


def spread_layers(
    model: nn.Module,
    world: World,
    degrees: ServingDegrees,
    groups: ServingGroups,
    sizes: StepSizes,
    dense: Mapping[str, Mapping[str, int]],
) -> None:
    """Shard the parameters of a model as DTensors, and give its layers their collectives. Every rank must call.

    The model has the same parameters on all ranks, or is on the meta device; call `as_plain` once it has its weights.
    The caller updates `sizes` before each forward. Modules of `dense` are cut, by the axis of each parameter, over a
    tensor group.
    """
    layers = {name: m for name, m in model.named_modules() if isinstance(m, MoELayer)}
    for layer in layers.values():
        experts = layer.grouped
        if experts is None or experts.paging is not None:
            raise ConfigError(
                f"layer {layer.layer_index}: an engine spreads experts of ours over ranks; use one process"
            )
    refuse_adapters(model)
    if degrees.tp > 1:
        mesh = world.mesh((degrees.num_groups, degrees.tp), ("group", "tp"), range(world.size))
        mlps = {
            f"{name}.{part}": MLP_CUT
            for name, layer in layers.items()
            for part in ("shared_experts", "residual_mlp")
            if getattr(layer, part) is not None
        }
        for name, cut in ({**dense} | mlps).items():
            _cut_module(model.get_submodule(name), mesh["tp"], groups.row, cut, where=name)
    for layer in layers.values():
        _cut_experts(layer, world, degrees)
        i, _ = part_of(world.position, degrees)
        num_local = layer.num_experts // degrees.e
        if world.size > 1:
            layer.dispatcher = CoordinatedDispatcher(
                groups,
                sizes,
                num_experts=layer.num_experts,
                first_expert=i * num_local,
                num_local=num_local,
                is_split=degrees.is_split,
                is_exact=layer.arithmetic.batch_invariant and degrees.is_whole,
                layer=f"layer {layer.layer_index}",
            )


def part_of(position: int, degrees: ServingDegrees) -> tuple[int, int]:
    """Indices (part of the experts, slice of the hidden size) of a rank."""
    return divmod(position // degrees.tp if degrees.is_split else position, degrees.f)


def _cut_module(module: nn.Module, mesh: DeviceMesh, row: RankGroup, cut: Mapping[str, int], *, where: str) -> None:
    """Cut a module over a tensor group; its output is summed over the ranks."""
    for name, _ in list(module.named_parameters()):
        distribute(module, name, mesh, cut.get(name))

    def summed(module: nn.Module, args: object, y: Tensor) -> Tensor:
        parts = all_gather(y, row, where=where)
        return parts.to(accumulate_dtype(y.dtype)).sum(0).to(y.dtype)

    module.register_forward_hook(summed)
    module.only_first_adds = row.rank > 0  # type: ignore[assignment]


def _cut_experts(layer: MoELayer, world: World, degrees: ServingDegrees) -> None:
    """Replace the experts' parameters and buffers by this rank's shards, as DTensors."""
    e, f = degrees.e, degrees.f
    copies = degrees.num_ranks // (e * f)
    sizes = {"e": e, "f": f, "copy": copies}
    axes = {name: size for name, size in sizes.items() if size > 1} or {"e": 1}
    mesh = world.mesh(tuple(axes.values()), tuple(axes), range(world.size))
    i, j = part_of(world.position, degrees)
    for name, full in own_tensors(layer.experts):
        cut: dict[str, Placement] = {"e": Shard(0)}
        part = full.detach()
        part = part.narrow(0, i * (part.shape[0] // e), part.shape[0] // e)
        axis = _EXPERT_AXES.get(name)
        if axis is not None and part.shape[axis] > 1:  # a scale shared by all columns is not cut
            cut["f"] = Shard(axis)
            part = part.narrow(axis, j * (part.shape[axis] // f), part.shape[axis] // f)
        shard = DTensor.from_local(
            part.clone(memory_format=torch.contiguous_format),
            mesh,
            [cut.get(name, Replicate()) for name in axes],
            run_check=False,
        )
        put_tensor(layer.experts, name, shard)
    layer.experts.num_experts = layer.num_experts // e
    layer.experts.only_first_adds = j > 0  # type: ignore[assignment]


@torch.no_grad()
def as_plain(model: nn.Module) -> None:
    """Replace the DTensors of `spread_layers` by plain local tensors, once they have their values."""
    for module in model.modules():
        for name, tensor in own_tensors(module):
            if isinstance(tensor, DTensor):
                put_tensor(module, name, tensor.to_local())
    for module in model.modules():
        if getattr(module, "only_first_adds", False):
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if name in ADDED_ONCE:
                    tensor.zero_()


def own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a module without those inside it, by name."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or a buffer; nothing has a gradient then."""
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def bring_rows_home(module: nn.Module, groups: ServingGroups, sizes: StepSizes) -> torch.utils.hooks.RemovableHandle:
    """Add a hook that gathers the rows of all tensor groups on rank 0 before a module runs; other ranks continue with
    no rows.

    The module is the norm before the logits, from which only rank 0 computes.
    """

    def gathered(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        x_RD, *rest = args
        if groups.row.rank > 0:
            return x_RD[:0], *rest
        rows = gather_home(x_RD, groups, sizes.rows, where="rows of logits")
        return x_RD[:0] if rows is None else rows, *rest

    return module.register_forward_pre_hook(gathered)


def gather_home(x_RD: Tensor, groups: ServingGroups, counts: list[int], *, where: str) -> Tensor | None:
    """Concatenate the rows of all tensor groups on rank 0; None elsewhere. The first rank of each group must call.

    `counts` are the numbers of rows of all groups.
    """
    leaders, most = groups.leaders, max(counts)
    if leaders.size == 1 or most == 0:
        return x_RD if leaders.rank == 0 else None
    padded = torch.nn.functional.pad(x_RD, (0, 0, 0, most - len(x_RD))).contiguous()
    parts = gather_to_first(padded, leaders, where=where)
    if parts is None:
        return None
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
