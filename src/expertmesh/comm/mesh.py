"""Factorisation of the ranks: dense layers as dp_replicate x dp_shard x tp, experts as dp_replicate x e x f."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from expertmesh.comm.world import World
from expertmesh.config.run import ExpertOrder
from expertmesh.errors import ConfigError, named

DENSE_AXES = ("dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True)
class DenseDegrees:
    """Sizes of the axes of the dense layers; rank = (replica * dp_shard + shard) * tp + tensor part."""

    dp_replicate: int  # copies of the model
    dp_shard: int  # ranks that share one copy's parameters
    tp: int  # ranks that share one sequence

    @property
    def num_ranks(self) -> int:
        """Number of ranks, the product of the degrees."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def num_storage_ranks(self) -> int:
        """Number of ranks of one copy, over which experts are sharded."""
        return self.dp_shard * self.tp


def dense_degrees(num_ranks: int, *, dp_replicate: int = 1, dp_shard: int | None = None, tp: int = 1) -> DenseDegrees:
    """Factor the ranks for the dense layers.

    Args:
        dp_shard: ranks that share one copy's parameters; None: num_ranks / (dp_replicate * tp).
    """
    given = dp_replicate * tp * (dp_shard or 1)
    if given == num_ranks or (dp_shard is None and num_ranks % given == 0):
        return DenseDegrees(dp_replicate, dp_shard or num_ranks // given, tp)
    valid = [DenseDegrees(r, num_ranks // (r * t), t) for r in divisors(num_ranks) for t in divisors(num_ranks // r)]

    def distance(choice: DenseDegrees) -> tuple[float, ...]:
        # Degrees without a default weigh first.
        wanted = (tp, dp_shard or choice.dp_shard, dp_replicate)
        got = (choice.tp, choice.dp_shard, choice.dp_replicate)
        return tuple(abs(math.log(a / b)) for a, b in zip(got, wanted, strict=True))

    near = min(valid, key=lambda choice: (sum(distance(choice)), distance(choice)))
    shown = "all_others" if dp_shard is None else dp_shard
    raise ConfigError(
        f"{named('dp_replicate_degree', dp_replicate)} x {named('dp_shard_degree', shown)} x {named('tp_degree', tp)} "
        f"does not make {num_ranks} ranks; nearest: {named('dp_replicate_degree', near.dp_replicate)}, "
        f"{named('dp_shard_degree', near.dp_shard)}, {named('tp_degree', near.tp)}"
    )


@dataclass(frozen=True)
class ExpertDegrees:
    """Sharding of one layer's experts over the W = e * f ranks of one copy.

    Attributes:
        order: slices_inner: neighbouring ranks hold slices of the same experts, rank = i * f + j; experts_inner:
            neighbouring ranks hold different experts, rank = j * e + i.
    """

    e: int  # number of parts along E
    f: int  # number of slices of each expert's hidden size (along F)
    order: ExpertOrder = "slices_inner"

    @property
    def num_ranks(self) -> int:
        """Number of ranks of one copy, W."""
        return self.e * self.f

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(i, j): index of the part of the experts and of the slice that a storage rank holds."""
        if self.order == "slices_inner":
            return divmod(rank, self.f)
        j, i = divmod(rank, self.e)
        return i, j

    def rank_of(self, i: int, j: int) -> int:
        """Storage rank with these coordinates."""
        return i * self.f + j if self.order == "slices_inner" else j * self.e + i


def expert_degrees(
    num_ranks: int,  # W
    *,
    num_experts: int,  # E
    hidden_dim: int,  # F
    es_degree: int | None = None,  # f; None: the smallest for which W / f divides E, which is W / gcd(E, W)
    order: ExpertOrder = "slices_inner",  # see `ExpertDegrees`
    num_replicas: int = 1,  # copies of the model, for the message
    tp_degree: int = 1,  # ranks of a copy that share sequences, for the message
) -> ExpertDegrees:
    """Factor the ranks of one copy for the experts of one layer."""
    f = num_ranks // math.gcd(num_experts, num_ranks) if es_degree is None else es_degree
    fits = _slices(num_ranks, num_experts, hidden_dim)
    if f in fits:
        return ExpertDegrees(num_ranks // f, f, order)
    if fits:
        fix = f"use {named('es_degree', min(fits, key=lambda d: abs(math.log(d / max(f, 1)))))}"
    else:
        # More copies of the model do not change its function, and a copy of one rank always fits.
        tp, copies = next(
            (t, r)
            for t in reversed(divisors(tp_degree))
            for r in divisors(num_ranks // t)
            if _slices(num_ranks // r, num_experts, hidden_dim)
        )
        wanted = num_ranks // math.gcd(num_experts, num_ranks)
        fix = "use " if tp == tp_degree else f"use {named('tp_degree', tp)} with "
        fix += f"{named('dp_replicate_degree', num_replicas * copies)}, or a hidden_dim divisible by {wanted}"
    raise ConfigError(
        f"{named('es_degree', f)} on {num_ranks} ranks, with num_experts={num_experts} and hidden_dim={hidden_dim}: "
        f"es_degree must divide the ranks and hidden_dim, and ranks / es_degree must divide num_experts; {fix}"
    )


def _slices(num_ranks: int, num_experts: int, hidden_dim: int) -> list[int]:
    """Valid values of es_degree, ascending."""
    return [d for d in divisors(num_ranks) if num_experts % (num_ranks // d) == 0 and hidden_dim % d == 0]


def dense_mesh(world: World, degrees: DenseDegrees) -> DeviceMesh:
    """Device mesh ("dp_replicate", "dp_shard", "tp"). Every rank must call."""
    shape = (degrees.dp_replicate, degrees.dp_shard, degrees.tp)
    return world.mesh(shape, DENSE_AXES, range(world.size))


def data_mesh(world: World, degrees: DenseDegrees) -> DeviceMesh:
    """Submesh of `dense_mesh` over which batches are split: its first two axes, or "dp_shard" alone if there is one
    copy."""
    mesh = dense_mesh(world, degrees)
    return mesh[DENSE_AXES[:2]] if degrees.dp_replicate > 1 else mesh["dp_shard"]


def expert_mesh(world: World, experts: ExpertDegrees) -> DeviceMesh:
    """Device mesh ("replica", "e", "f") of one layer's experts, without axes of size 1; every rank must call.

    DTensor tries all shardings of an operator for each axis: with three axes its first sums take seconds.
    """
    W = experts.num_ranks
    order = [
        replica * W + experts.rank_of(i, j)
        for replica in range(world.size // W)
        for i in range(experts.e)
        for j in range(experts.f)
    ]
    sizes = {"replica": world.size // W, "e": experts.e, "f": experts.f}
    axes = {name: size for name, size in sizes.items() if size > 1} or {"e": 1}
    return world.mesh(tuple(axes.values()), tuple(axes), order)


def divisors(number: int) -> Sequence[int]:
    """Divisors of a number, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0]
