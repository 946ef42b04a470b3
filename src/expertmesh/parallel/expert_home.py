"""Where the experts of one layer live: what every way to hold them over ranks has in common."""

from abc import ABC, abstractmethod

import torch

from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import ExpertDegrees
from expertmesh.comm.world import World
from expertmesh.moe.experts import ExpertParameters
from expertmesh.parallel.plan import Plan
from expertmesh.parallel.weights_in_use import WeightsInUse


class ExpertHome(ABC):
    """The ranks that hold the experts of one layer.

    Args:
        world: all ranks; every one must construct the home.
        degrees: how the W ranks of one copy hold the experts; world.size / W copies are kept equal.
        layer: name for errors and the byte counter.
    """

    casts_tokens: bool
    """Whether the experts compute in autocast's type whatever comes, so that tokens may travel in it."""

    def __init__(self, world: World, degrees: ExpertDegrees, *, layer: str) -> None:
        self.world, self.degrees, self.layer = world, degrees, layer
        W = degrees.num_ranks
        self.rank = world.position % W
        self.num_replicas = world.size // W
        cells = [[r + W * copy for copy in range(self.num_replicas)] for r in range(W)]
        self.replicas: RankGroup = world.group(cells, name="copies of the experts")

    def group(self, cells: list[list[int]], name: str) -> RankGroup:
        """This rank's cell of a partition of the ranks of one copy, alike in all copies; every rank must ask."""
        W = self.degrees.num_ranks
        all_cells = [
            [W * copy + r for r in cell] for copy in range(self.num_replicas) for cell in cells
        ]
        return self.world.group(all_cells, name=name)

    @abstractmethod
    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Know of each step of an optimiser."""

    @abstractmethod
    def start_gather(self, plan: Plan, dtype: torch.dtype | None) -> WeightsInUse | None:
        """Begin to gather what this rank computes under a plan, in a type (None: the parameters' own); None: nothing."""

    @abstractmethod
    def finish_gather(self, use: WeightsInUse) -> ExpertParameters:
        """Wait for it; gives the parameters of the experts that this rank computes, differentiable."""
