"""Tensor parallelism with sequence parallelism: ranks share sequences, and each computes a slice of some modules.

The ranks of a tensor-parallel group work on the same rows of a batch, each on its own positions of every sequence.
Modules that treat tokens one by one (norms, routers) run on these positions with whole parameters (`Whole`). Modules
that mix positions or are large run sliced on the tokens of the whole group (`Sliced`): all-gather, compute,
reduce-scatter (Korthikanti et al. 2022, arXiv 2205.05198, figure 5). Experts are not cut: each rank routes its own
tokens.

Parameters are DTensors. Modules see plain local tensors while they run, so operators do not depend on DTensor.
"""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from expertmesh.comm.collectives import all_gather, reduce_scatter
from expertmesh.comm.group import RankGroup
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError, named
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.module_adapters import adapters_in
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.spec.feed_forward import MLP_CUT

TensorPlan = Mapping[str, ParallelStyle]
"""Module names to styles, such as `layers.*.attention`; * stands for any text between two dots."""


def tensor_group(world: World, tp_degree: int) -> RankGroup:
    """Tensor-parallel group of this rank: neighbouring ranks that share sequences; every rank must call."""
    if world.size % tp_degree:
        raise ConfigError("tp_degree", tp_degree, f"must divide the {world.size} ranks", "choose a divisor")
    cells = [range(first, first + tp_degree) for first in range(0, world.size, tp_degree)]
    return world.group(cells, name="the ranks that share sequences")


@dataclass(frozen=True)
class SharedSequences:
    """Interface of a model to the tensor-parallel ranks that share its sequences."""

    group: RankGroup  # the ranks that share sequences

    @property
    def size(self) -> int:
        """Number of ranks that share sequences."""
        return self.group.size

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        return self.group.rank

    def gather_tokens(self, x_T: Tensor) -> Tensor:
        """All-gather a tensor of one value per token, concatenated in rank order."""
        return all_gather(x_T, self.group, where="routing groups over ranks").flatten(0, 1)

    def own_part(self, x: Tensor, *, dim: int) -> Tensor:
        """View of the positions of this rank along an axis that covers all ranks."""
        length, n = x.shape[dim], self.size
        if length % n:
            raise ConfigError(
                f"a sequence of {length} tokens on {named('tp_degree', n)}: it must divide them; use "
                f"{max(length // n, 1) * n} tokens"
            )
        return x.narrow(dim, length // n * self.group.rank, length // n)

    def gather(self, parameter: Tensor) -> Tensor:
        """All-gather a parameter that is cut over the ranks (`ShardedStorage`) as a plain tensor; its gradient is
        reduce-scattered."""
        assert isinstance(parameter, DTensor), "only a parameter with a style is cut"
        placement = parameter.placements[0]
        part = _local_view(parameter)
        if not isinstance(placement, Shard):
            return part
        return join_parts(part, self.group, dim=placement.dim, where="stored parameters")


def join_parts(x: Tensor, group: RankGroup, *, dim: int, where: str) -> Tensor:
    """All-gather tensors and concatenate them along an axis; the gradient is reduce-scattered."""
    return all_gather(x, group, where=where).movedim(0, dim).flatten(dim, dim + 1)


def sum_own_part(x: Tensor, group: RankGroup, *, dim: int, where: str) -> Tensor:
    """Reduce-scatter a tensor along an axis; the gradient is all-gathered."""
    parts = x.unflatten(dim, (group.size, x.shape[dim] // group.size)).movedim(dim, 0)
    return reduce_scatter(parts, group, where=where)


class ShardedStorage(ParallelStyle):
    """Style that shards a module's parameters for storage; users gather them first (`SharedSequences.gather`).

    Args:
        cut: sharded axis by parameter name; other parameters are whole on every rank.
    """

    def __init__(self, cut: Mapping[str, int]) -> None:
        self.cut = cut

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in [name for name, _ in module.named_parameters()]:
            distribute(module, name, device_mesh, self.cut.get(name))
        return module


class Whole(ParallelStyle):
    """Style of a module that treats tokens one by one: it runs on this rank's tokens, and gradients are summed over the
    group.

    Parameters that are DTensors already (of a nested module with its own style, of experts) are left unchanged.

    Args:
        recurse: whether its forward reads parameters of nested modules, which must then not be FSDP blocks of their
            own.
        apart: nested parameters that differ from rank to rank.
    """

    def __init__(self, *, recurse: bool = True, apart: AbstractSet[nn.Parameter] = frozenset()) -> None:
        self.recurse, self.apart = recurse, apart

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        _LocalParameters(module, device_mesh, recurse=self.recurse, apart=self.apart)
        return module


class Sliced(ParallelStyle):
    """Style of a module of which each rank computes a slice for all tokens of the group; the output is the sum of the
    slices.

    The first argument is all-gathered along the tokens' axis, and the output is reduce-scattered along it.

    Args:
        cut: axis along which each parameter is cut, by name within the module; the others are whole on every rank.
        once: parameters that are added to the output, and therefore used on rank 0 only.
    """

    def __init__(
        self,
        group: RankGroup,  # the tensor-parallel ranks
        cut: Mapping[str, int],
        *,
        once: frozenset[str] = frozenset(),
        dim: int = 0,  # axis of the tokens
        where: str,  # layer and purpose, for errors and the byte counter
    ) -> None:
        self.group, self.cut, self.once, self.dim, self.where = group, cut, once, dim, where

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        once = self.once if self.group.rank else frozenset[str]()
        cut = {**self.cut, **adapter_cuts(module, self.cut)}
        _LocalParameters(module, device_mesh, cut=cut, once=once)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *rest = args
            cast = autocast_dtype(x.device)
            if cast is not None and x.dtype != torch.float64:
                x = x.to(cast)  # the matmuls cast in any case; casting first halves the bytes sent
            return join_parts(x, self.group, dim=self.dim, where=self.where), *rest

        def after(module: nn.Module, args: Any, y: Tensor) -> Tensor:
            return sum_own_part(y, self.group, dim=self.dim, where=self.where)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module


def adapter_cuts(module: nn.Module, cut: Mapping[str, int]) -> dict[str, int]:
    """Axes along which factors of adapters are cut, by name within a module, where its parameters are."""
    found = {}
    for name, adapter in adapters_in(module):
        if name in cut:
            path, _, leaf = name.rpartition(".")
            factor, axis = adapter.cut(cut[name])
            found[f"{path}.adapters.{leaf}.{factor}".removeprefix(".")] = axis
    return found


def sliced_mlp(group: RankGroup, *, where: str) -> Sliced:
    """Style of a `DenseMLP`, cut along its hidden size."""
    return Sliced(group, MLP_CUT, once=frozenset({"b_out"}), where=where)


def apply_plan(model: nn.Module, mesh: DeviceMesh, group: RankGroup, plan: TensorPlan) -> None:
    """Give every module of a model its style from the plan, or `Whole`. Experts must be sharded before.

    The dense parts of each `MoELayer` need no plan: shared experts and the residual MLP are cut along their hidden
    size.
    """
    check_plan(model, plan, num_ranks=group.size)
    modules = dict(model.named_modules())
    for pattern, style in plan.items():
        for name in [name for name in modules if _matches(name, pattern)]:
            # All ranks have the same parameters, so no broadcast is needed.
            parallelize_module(modules[name], mesh, style, src_data_rank=None)
    layers = [module for module in modules.values() if isinstance(module, MoELayer)]
    for layer in layers:
        for name in ("shared_experts", "residual_mlp"):
            mlp = getattr(layer, name)
            if mlp is not None and not any(isinstance(p, DTensor) for p in mlp.parameters()):
                where = f"layer {layer.layer_index}, {name}"
                parallelize_module(mlp, mesh, sliced_mlp(group, where=where), src_data_rank=None)
    # A MoE layer reads parameters of nested modules; other modules are assumed to read their own only.
    experts = {p for layer in layers for p in layer.experts.parameters()}
    for layer in layers:
        parallelize_module(layer, mesh, Whole(apart=experts), src_data_rank=None)
    for module in modules.values():
        own = [p for p in module.parameters(recurse=False) if p not in experts]
        if any(not isinstance(p, DTensor) for p in own):
            parallelize_module(module, mesh, Whole(recurse=False), src_data_rank=None)


def check_plan(model: nn.Module, plan: TensorPlan, *, num_ranks: int) -> None:
    """Check, before a model is changed, that it fits a tensor plan; torch's own styles are not checked."""
    _refuse_shared(model)
    modules, cuts = dict(model.named_modules()), dict[str, Mapping[str, int]]()
    for pattern, style in plan.items():
        found = [name for name in modules if _matches(name, pattern)]
        if not found:
            raise ConfigError(
                f"tensor_plan: {pattern} is no module of the model; name one, with * for anything between two dots"
            )
        if isinstance(style, Sliced | ShardedStorage):
            cuts |= dict.fromkeys(found, style.cut)
    for name, module in modules.items():
        if isinstance(module, MoELayer):
            mlps = [(f"{name}.{own}", own) for own in ("shared_experts", "residual_mlp")]
            cuts |= {path: MLP_CUT for path, own in mlps if getattr(module, own) is not None and path not in cuts}
    for name, cut in cuts.items():
        parameters = dict(model.get_submodule(name.removeprefix(".")).named_parameters())
        for own, axis in cut.items():
            if own in parameters:
                check_cut(own, parameters[own], axis, num_ranks=num_ranks)


def check_cut(path: str, full: Tensor, axis: int, *, num_ranks: int) -> None:
    """Raise ConfigError unless a parameter can be cut into equal parts along an axis."""
    if full.shape[axis] % num_ranks:
        raise ConfigError(
            "tp_degree",
            num_ranks,
            f"{path} of shape {tuple(full.shape)} cannot be cut into {num_ranks} equal parts along axis {axis}",
            "use sizes that it divides",
        )


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _refuse_shared(model: nn.Module) -> None:
    names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        other = names.setdefault(parameter, name)
        if other != name:
            raise ConfigError(
                f"tensor parallelism: {other} and {name} are one parameter; let one module have it, and the other "
                "read it there"
            )


class _LocalParameters:
    """Turns parameters of a module and its nested modules into DTensors, and shows plain local tensors while it
    runs."""

    def __init__(
        self,
        module: nn.Module,  # module whose forward reads the parameters
        mesh: DeviceMesh,  # mesh of the tensor-parallel group
        *,
        cut: Mapping[str, int] = MappingProxyType({}),  # sharded axis by parameter name
        once: frozenset[str] = frozenset(),  # names of parameters that are multiplied by zero on this rank
        recurse: bool = True,  # whether parameters of nested modules are included
        apart: AbstractSet[nn.Parameter] = frozenset(),  # parameters that are left unchanged
    ) -> None:
        self._owners: list[tuple[nn.Module, str, bool]] = []
        self._hidden: list[list[nn.Parameter | None]] = []
        for name, parameter in list(module.named_parameters(recurse=recurse)):
            if isinstance(parameter, DTensor) or parameter in apart:
                continue
            owner, leaf = distribute(module, name, mesh, cut.get(name))
            self._owners.append((owner, leaf, name in once))
        module.register_forward_pre_hook(self._show)
        module.register_forward_hook(self._hide, always_call=True)

    def _show(self, module: nn.Module, args: Any) -> None:
        self._hidden.append([owner._parameters[name] for owner, name, _ in self._owners])
        for owner, name, is_idle in self._owners:
            parameter = owner._parameters[name]
            local = _local_view(parameter)
            # Kept in the graph: all ranks sum its gradient, which is zero here.
            owner._parameters[name] = local * 0.0 if is_idle else local  # type: ignore[assignment]

    def _hide(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._hidden:  # the pre-hook failed, so nothing is hidden
            return
        for (owner, name, _), parameter in zip(self._owners, self._hidden.pop(), strict=True):
            owner._parameters[name] = parameter


def _local_view(parameter: Tensor | None) -> Tensor:
    assert isinstance(parameter, DTensor), "the parameter was replaced by a plain one"
    grads: list[Placement] = [
        Partial() if placement.is_replicate() else placement for placement in parameter.placements
    ]
    return parameter.to_local(grad_placements=grads)


def distribute(module: nn.Module, path: str, mesh: DeviceMesh, axis: int | None) -> tuple[nn.Module, str]:
    """Replace a parameter by a DTensor; returns the module that holds it, and its name there."""
    prefix, _, name = path.rpartition(".")
    owner = module.get_submodule(prefix)
    full = owner.get_parameter(name)
    part, placement = full.detach(), cast("Placement", Replicate())
    if axis is not None:
        n = mesh.size()
        check_cut(path, full, axis, num_ranks=n)
        size = full.shape[axis] // n
        part = part.narrow(axis, mesh.get_local_rank() * size, size)
        part, placement = part.clone(memory_format=torch.contiguous_format), Shard(axis)
    shard = DTensor.from_local(part, mesh, [placement], run_check=False)
    owner.register_parameter(name, nn.Parameter(shard, requires_grad=full.requires_grad))
    return owner, name
