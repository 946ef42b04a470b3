"""User modules as experts, sharded over ranks: each rank keeps some of them, under their global names."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from expertmesh.comm.collectives import start_all_reduce
from expertmesh.comm.group import RankGroup, wait
from expertmesh.comm.mesh import ExpertDegrees
from expertmesh.comm.world import World
from expertmesh.errors import ConfigError, named
from expertmesh.moe.experts import ExpertList, ExpertParameters, FirstOutput, Parameters
from expertmesh.parallel.experts.gather import GatheredWeights
from expertmesh.parallel.experts.owned import OwnedParameter, check_left_alone
from expertmesh.parallel.experts.replicated_experts import ReplicatedWeights
from expertmesh.parallel.experts.route_split import RouteSplit
from expertmesh.parallel.experts.storage import ExpertShards


def module_degrees(
    num_ranks: int,
    *,
    num_experts: int,
    es_degree: int | None = None,
    route_degree: int | None = None,
    offload: bool = False,
) -> ExpertDegrees:
    """Degrees of W ranks that hold user modules: each rank has E / W of them, whole."""
    if num_experts % num_ranks:
        raise ConfigError(
            f"{num_experts} experts that are modules of your own on {num_ranks} ranks: each rank keeps whole modules, "
            "as many as the others; use a multiple of the ranks as num_experts, or more copies (dp_replicate_degree, "
            "num_replicas)"
        )
    reasons = {
        "es_degree": (es_degree, 1, "they cannot be sliced"),
        "route_degree": (
            route_degree,
            num_ranks,
            "they stay where they are, so tokens must be dispatched",
        ),
        "offload": (offload or None, False, "their parameters are their own"),
    }
    for name, (given, only, why) in reasons.items():
        if given not in (None, only):
            raise ConfigError(
                f"{name}={given} with experts that are modules of your own: {why}; use {name}={only} or leave it out"
            )
    return ExpertDegrees(num_ranks, 1)


class SpreadExpertList(ExpertList):
    """Expert modules of one rank, under their names in the whole list: experts.INDEX.NAME with global indices.

    Parameters shared by several modules of a rank stay shared; across ranks each rank has its own.
    """

    def __init__(
        self,
        experts: ExpertList,  # all experts; only this rank's are kept
        *,
        first: int,  # index of the first one kept
        count: int,  # number of experts kept
        owners: RankGroup,  # ranks of one replica, over which norms are summed
        replicas: RankGroup,  # ranks that hold the same modules; gradients are summed over them
        layer: str,  # name for errors and the byte counter
    ) -> None:
        super().__init__((), backend=experts.backend)
        for index in range(first, first + count):
            self.add_module(str(index), experts[index])
        self.num_experts, self._replicas, self._layer = count, replicas, layer
        self._owners = owners
        self._own_parameters()

    def _own_parameters(self) -> None:
        for parameter in self.parameters():
            OwnedParameter.adopt(parameter, self._owners)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SpreadExpertList":
        super()._apply(fn, recurse)  # a move to another device creates plain parameters
        self._own_parameters()
        return self

    def forward(self, x_TD: Tensor, *route: Any, **options: Any) -> Tensor:
        """Output of `ExpertList.forward` cast to x's dtype, which is equal on all ranks."""
        trained = any(parameter.requires_grad for parameter in self.parameters())
        if trained and torch.is_grad_enabled() and not x_TD.requires_grad:
            # A rank without rows must join the backward of the exchanges.
            x_TD = x_TD.detach().requires_grad_()
        return super().forward(x_TD, *route, **options).to(x_TD.dtype)

    def callables(self, x_TD: Tensor) -> tuple[Tensor, list[Callable[[Tensor], Tensor]], Parameters]:
        """Modules and their parameters; with replicas, gradients of the parameters are summed over these."""
        own = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self._replicas.size == 1 or not own or not torch.is_grad_enabled():
            return super().callables(x_TD)
        x_TD, *views = _SumOverCopies.apply(self._replicas, self._layer, x_TD, *own)
        view_of = dict(zip(own, views, strict=True))

        def called(expert: nn.Module) -> Callable[[Tensor], Tensor]:
            # Every name of a parameter, but each module once: functional_call does not restore a module that it meets
            # twice.
            given = {
                f"{path}.{name}" if path else name: view_of[parameter]
                for path, module in expert.named_modules()
                for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
                if parameter in view_of
            }
            return partial(_call_with, expert, given)

        experts = list(self.children())
        seen = [[view_of[p] for p in expert.parameters() if p in view_of] for expert in experts]
        return x_TD, [called(expert) for expert in experts], seen


def _call_with(expert: nn.Module, parameters: Mapping[str, Tensor], x_RD: Tensor) -> Tensor:
    y_RD: Tensor = torch.func.functional_call(expert, dict(parameters), (x_RD,), tie_weights=False)
    return y_RD


class _SumOverCopies(torch.autograd.Function):
    """Identity on tokens and parameters; gradients of parameters are summed over the replicas.

    Tokens are an input so that every rank runs the backward, even one without rows.
    """

    @staticmethod
    def forward(ctx: Any, group: RankGroup, layer: str, x_TD: Tensor, *own: Tensor) -> Any:
        ctx.group, ctx.where = group, f"{layer}, gradients of its modules"
        ctx.save_for_backward(*own)
        ctx.set_materialize_grads(False)
        return x_TD.view_as(x_TD), *(parameter.view_as(parameter) for parameter in own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x_TD: Tensor | None, *grads: Tensor | None) -> tuple[Any, ...]:
        own = ctx.saved_tensors
        called = torch.tensor([grad is not None for grad in grads], dtype=torch.int32)
        called = called.to(own[0].device)
        wait(start_all_reduce(called, ctx.group, where=ctx.where))
        summed: list[Tensor | None] = []
        for grad, parameter, count in zip(grads, own, called.tolist(), strict=True):
            if count == 0:  # unused on every rank: no gradient, as in one process
                summed.append(None)
                continue
            total = torch.zeros_like(parameter) if grad is None else grad.contiguous().clone()
            wait(start_all_reduce(total, ctx.group, where=ctx.where))
            summed.append(total)
        return None, None, d_x_TD, *summed


MODULES_STAY = "experts that are modules of your own"
"""Value of `ExpertShards.stay` for user modules."""


def check_modules(experts: ExpertList, degrees: ExpertDegrees) -> int:
    """Number of modules that each rank keeps."""
    count = experts.num_experts // degrees.num_ranks
    sizes = [len(list(expert.parameters())) for expert in experts]
    absent = [isinstance(e, FirstOutput) and e.expert is None for e in experts]  # only its rank knows
    without = [
        first
        for first in range(0, len(sizes), count)
        if not any(sizes[first:][:count]) and not all(absent[first:][:count])
    ]
    if without and any(sizes):
        raise ConfigError(
            f"experts {without[0]} to {without[0] + count - 1} have no parameter, and are all that one rank would "
            "have: norms of gradients are sums over ranks that have some; put them between the others"
        )
    return count


def _empty(strangers: Iterable[nn.Parameter]) -> None:
    """Free what other ranks' experts take; an engine that was given their parameters finds nothing to train."""
    for parameter in strangers:
        parameter.requires_grad_(False).data = parameter.data.new_empty(0)


class ExpertModules(ExpertShards):
    """Holds user modules as experts; nothing is gathered."""

    casts_tokens = False
    stay = MODULES_STAY

    def __init__(
        self,
        experts: ExpertList,  # all modules; `SpreadExpertList` keeps this rank's
        world: World,  # all ranks; every one must construct this
        degrees: ExpertDegrees,
        *,
        layer: str,  # name for errors and the byte counter
        plain: bool = False,  # see `ExpertShards`
    ) -> None:
        super().__init__(world, degrees, layer=layer, plain=plain)
        count = check_modules(experts, degrees)
        self.modules = SpreadExpertList(
            experts,
            first=self.rank * count,
            count=count,
            owners=self.owners,
            replicas=self.replicas,
            layer=layer,
        )
        if plain:
            _empty(set(experts.parameters()) - set(self.modules.parameters()))

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: no weights are kept."""

    def start_gather(self, split: RouteSplit, dtype: torch.dtype | None) -> None:
        """Check the split, and that no wrapper took the parameters; no weights are gathered."""
        check_left_alone(self.modules, layer=self.layer)
        W = self.degrees.num_ranks
        if split.route_degree != W:
            raise ConfigError(
                f"{named('route_degree', split.route_degree)} with {self.stay}: they stay where they are, so tokens "
                f"must be dispatched; use {named('route_degree', W)} or leave it out"
            )

    def finish_gather(self, use: GatheredWeights, *, num_calls: int = 1) -> ExpertParameters:
        """Never called: no weights are gathered."""
        raise AssertionError("nothing is gathered")

    def replicate(self, hot: Sequence[int], dtype: torch.dtype | None) -> ReplicatedWeights:
        """Never called: modules stay on their ranks."""
        raise AssertionError("they stay")
