"""`RunCosts`: parameters, operations and memory of a training run, from its configuration alone."""

from dataclasses import dataclass

from expertmesh.costs.memory import MemoryEstimate, RankMemory


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run.

    Attributes:
        parameters: number of parameters.
        active: number of parameters that one item (a token, an image) uses.
        num_items: items of all steps.
        flops_per_item: operations of training on one item.
        alone: memory of one process that trains alone.
        each: memory of each of several ranks, activations left out; None for one.
    """

    parameters: int
    active: int
    num_items: int
    flops_per_item: int
    alone: MemoryEstimate
    each: RankMemory | None
