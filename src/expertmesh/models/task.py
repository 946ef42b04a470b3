"""Model families, the half with torch: what trainer and report need of a model's data, its loss and its measure.

A family of one's own is a `Task` with three methods (`prepare`, `loss`, `measure`) and an
`expertmesh.models.builder.ModelBuilder` with one (`build`), named by an `expertmesh.models.family.Family`. docs/extending.md
writes one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.builder import ModelBuilder
from expertmesh.moe.types import RoutingStats
from expertmesh.parallel.ranks import Ranks

Batch = Any
"""Tensors in tuples, lists or dictionaries; the first axis of each is the sample."""


class Data(Protocol):
    """What a run learns from. Sample i is the same for any batch size and any number of ranks.

    It may have `num_validation`, too, the number of validation samples, of which progress then has a total.
    """

    @property
    def key(self) -> str:
        """Digest of all that the samples depend on; a run goes on with the same key only."""

    @property
    def description(self) -> str:
        """Where the samples are from and how many there are, in words."""

    @property
    def files(self) -> Mapping[str, Path]:
        """Files to keep with the run, by the name that they get there."""

    def batch(self, first_sample: int, num_samples: int) -> Batch:
        """Training samples first_sample ... first_sample + num_samples - 1, on the CPU."""

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[Batch]:
        """At most so many validation samples (None: all) in batches of this size; the last may be smaller."""


class Loss(NamedTuple):
    """The loss of some samples.

    Attributes:
        total: scalar, **summed** over the items of these samples; the trainer divides by the items of the whole batch.
        stats: routing statistics of every MoE layer, in layer order; their losses are added by the trainer.
    """

    total: Tensor
    stats: Sequence[RoutingStats] = ()


@dataclass(frozen=True)
class Part:
    """Which part of a run's batch a call of `Task.loss` or `Task.measure` is about.

    Attributes:
        step: the step of the run, from 0.
        rows: its samples in the whole batch.
        ranks: the ranks that work on the batch.
        num_items: counted before these samples went to the device: in training by `Task.num_items`, in evaluations where
            the task `measures_items`; None: they were not.
    """

    step: int
    rows: slice
    ranks: Ranks
    num_items: int | None = None

    def token_index(
        self, tokens_per_sample: int, device: torch.device, *, stride: int | None = None
    ) -> Tensor:
        """(T,) int64 indices of its tokens in the whole batch, which key the noise of routers.

        Args:
            tokens_per_sample: that are there.
            device: of the result.
            stride: tokens of a sample before `Task.cut` took the last ones off, which keep their indices; None: all are there.
        """
        start, stop = self.rows.start, self.rows.stop
        stride = tokens_per_sample if stride is None else stride
        if stride == tokens_per_sample:
            return torch.arange(start * stride, stop * stride, device=device)
        firsts_B = torch.arange(start * stride, stop * stride, stride, device=device)
        return (firsts_B[:, None] + torch.arange(tokens_per_sample, device=device)).flatten()

    def positions(self, x_BS: Tensor) -> Tensor:
        """This rank's positions of its samples, where ranks share sequences."""
        return self.ranks.positions(x_BS)


class Baseline(NamedTuple):
    """Something simple that a trained model should beat.

    Attributes:
        name: in words.
        short: in fewer words.
        value: the value of the family's metric, on all of the validation data.
    """

    name: str
    short: str
    value: float


class Task(ABC):
    """Data, loss and measure of one run; its model is made by the `builder`.

    Args:
        config: the run's configuration.
    """

    config: Any
    builder_class: ClassVar[type[ModelBuilder]]
    """Makes the models of the family."""
    measures_items = False
    """Whether `measure` needs the number of its items on the host, as `Part.num_items`."""
    has_lessons = False
    """Whether `loss` listens to a teacher."""
    labels: tuple[str, ...] = ()
    """Kinds of samples, languages or domains, for which the use of the experts is recorded apart; set by `prepare`."""
    teacher: nn.Module | None = None
    """A model of the family in evaluation mode, placed as the model is, where distill.teacher names one."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if not hasattr(self, "builder_class"):
            raise ConfigError(
                f"{type(self).__name__}: says not how its model is made; set builder_class to a ModelBuilder with a build()"
            )
        self.builder = self.builder_class(config)

    @abstractmethod
    def prepare(self) -> Data:
        """Find the data. Every rank calls, rank 0 first, so that it can fill a cache.

        Raises:
            ConfigError: there is something wrong with them.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """The loss of some samples in training mode, under autocast.

        Args:
            model: the model as the builder's `place` returned it.
            batch: samples on the model's device.
            part: which they are.
        """

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch, part: Part) -> Mapping[str, Tensor | float]:
        """Sums over some validation samples in evaluation mode, under autocast; by name, the same names in every call."""

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """What an evaluation says, "loss" and the family's metric among it: here, each sum over the one named "items".

        Args:
            sums: those of `measure` over all validation samples.
        """
        return {
            name: value / sums["items"] if sums["items"] else float("nan")
            for name, value in sums.items()
            if name != "items"
        }

    def num_items(self, batch: Batch) -> int:
        """Items in a batch on the CPU, over which the loss is a mean; here, its samples."""
        return num_samples(batch)

    def num_routed(self, batch: Batch, ranks: Ranks) -> Sequence[int]:
        """Tokens over which the routing losses of each MoE layer are means, in layer order; one number alone counts for all layers.

        Args:
            batch: on the CPU.
            ranks: those that share sequences count their positions of it each; here, the same part of the items.
        """
        return [self.num_items(batch) // ranks.tp_degree]

    def cut(self, batch: Batch) -> Batch:
        """Samples that are computed together, of all ranks, without the padding at their ends that none of them needs; here, all.

        Args:
            batch: on the CPU; the same on all ranks.
        """
        return batch

    def label_of(self, batch: Batch) -> Tensor:
        """(B,) int64, which of the `labels` each sample has; asked where there are any.

        Raises:
            ConfigError: here, because only who names labels knows which sample has which.
        """
        raise ConfigError(
            "family",
            self.config.family,
            "its task has labels and says of no sample which it has",
            "write its label_of, or leave labels empty",
        )

    def baseline(self, data: Data) -> Baseline | None:
        """What a report compares the model with; here, nothing."""
        return None


def num_samples(batch: Batch) -> int:
    """Samples of a batch."""
    return len(pytree.tree_leaves(batch)[0])


def each_tensor(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with a function applied to every tensor."""
    return pytree.tree_map(function, batch)
