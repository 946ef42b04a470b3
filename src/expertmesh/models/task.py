"""Model families, the part with torch: data, loss and measure of a run, as trainer and report use them.

To write your own family, define a `Task` with three methods (`prepare`, `loss`, `measure`), an
`expertmesh.models.builder.ModelBuilder` with one (`build`), and an `expertmesh.models.family.Family` that names them.
docs/extending.md writes one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.builder import ModelBuilder
from expertmesh.models.family import Metric
from expertmesh.moe.types import RoutingStats
from expertmesh.parallel.ranks import Ranks

Batch = Any
"""Tensors in tuples, lists or dictionaries; the first axis of each is the sample."""


def named_tensors(batch: Batch) -> Mapping[str, Tensor]:
    """Entries of a batch that it has by name; empty if there are none."""
    return next((one for one in batch if isinstance(one, Mapping)), {})


class Data(Protocol):
    """Training and validation samples of a run. Sample i is the same for any batch size and any number of ranks.

    An optional `num_validation`, the number of validation samples, gives progress of evaluations a total. An optional
    `num_training`, the number of training samples, is needed by `train.epochs`.
    """

    @property
    def key(self) -> str:
        """Digest of everything that the samples depend on; a run resumes only with the same key."""

    @property
    def description(self) -> str:
        """Source and number of the samples, in words."""

    @property
    def files(self) -> Mapping[str, Path]:
        """Files to copy into the run directory, by their names there."""

    def batch(self, first_sample: int, num_samples: int) -> Batch:
        """Training samples first_sample ... first_sample + num_samples - 1, on the CPU."""

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[Batch]:
        """Batches of at most max_samples validation samples (None: all); the last batch may be smaller."""


class Loss(NamedTuple):
    """Loss and routing statistics of some samples.

    Attributes:
        total: scalar, **summed** over the items of these samples; the trainer divides by the items of the whole batch.
        stats: routing statistics of every MoE layer, in layer order; their losses are added by the trainer.
        sums: sums over these samples by name, as `Task.measure` returns them, of which `Task.evaluation` makes the
            step's measures; every call returns the same names.
    """

    total: Tensor
    stats: Sequence[RoutingStats] = ()
    sums: Mapping[str, Tensor | float] = MappingProxyType({})


@dataclass(frozen=True)
class Part:
    """Part of a run's batch that a call of `Task.loss` or `Task.measure` processes.

    Attributes:
        num_items: items of these samples, counted by `Task.progress_items` before the samples went to the device:
            always in training, in evaluations if the task `measures_items`; None: not counted.
    """

    step: int  # the step of the run, from 0
    rows: slice  # slice of its samples in the whole batch
    ranks: Ranks  # the ranks that work on the batch
    num_items: int | None = None

    def token_index(self, tokens_per_sample: int, device: torch.device, *, stride: int | None = None) -> Tensor:
        """Indices (T,) int64 of its tokens in the whole batch, which key the noise of routers.

        Args:
            stride: tokens of a sample before `Task.cut` removed the last ones, which keep their indices; None: none
                removed.
        """
        start, stop = self.rows.start, self.rows.stop
        stride = tokens_per_sample if stride is None else stride
        if stride == tokens_per_sample:
            return torch.arange(start * stride, stop * stride, device=device)
        firsts_B = torch.arange(start * stride, stop * stride, stride, device=device)
        return (firsts_B[:, None] + torch.arange(tokens_per_sample, device=device)).flatten()

    def positions(self, x_BS: Tensor) -> Tensor:
        """Columns of x_BS that belong to this rank, where ranks share sequences."""
        return self.ranks.positions(x_BS)


class Begin(NamedTuple):
    """Beginning of a call of the trainer, for `Task.begin`."""

    step: int  # steps done before
    folder: Path  # the run directory, for values that a resumed run cannot compute again; rank 0 writes
    ranks: Ranks


class Baseline(NamedTuple):
    """Simple baseline that a trained model should beat."""

    name: str  # display name
    short: str  # short display name
    value: float  # the family's metric on all of the validation data


class Task(ABC):
    """Data, loss and measure of one run; the `builder` makes its model.

    Args:
        config: the run's configuration.
    """

    config: Any
    builder_class: ClassVar[type[ModelBuilder]]
    """Builder of the family's models."""
    measures_items = False
    """Whether `measure` needs the number of its items on the host, as `Part.num_items`."""
    evaluates = False
    """Whether `loss` computes as in evaluation, without router noise, masking and dropout; the trainer sets the model's
    mode."""
    num_updates = 1
    """Optimizer steps with an enriched batch, each on an equal part of its samples."""
    has_lessons = False
    """Whether `loss` supports distillation from a teacher."""
    metric: Metric | None = None
    """Metric of the run's evaluations; None: the family's."""
    labels: tuple[str, ...] = ()
    """Kinds of samples, such as languages or domains, for which expert use is recorded separately; set by `prepare`."""
    samples: Sequence[Mapping[str, Any]] = ()
    """Answers to a prompt of the last step, where the task lets the model write: "prompt", "text" and more."""
    teacher: nn.Module | None = None
    """A model of the family in evaluation mode, placed as the model is, where distill.teacher names one."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        if not hasattr(self, "builder_class"):
            raise ConfigError(
                f"{type(self).__name__}: does not set builder_class; set it to a ModelBuilder with a build()"
            )
        self.builder = self.builder_class(config)

    @abstractmethod
    def prepare(self) -> Data:
        """Prepare the data. Every rank calls, rank 0 first, so that it can fill a cache.

        Raises:
            ConfigError: the data are missing or damaged.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """The loss of some samples in training mode, under autocast.

        Args:
            model: the model as the builder's `place` returned it.
            batch: samples on the model's device.
            part: their place in the whole batch.
        """

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch, part: Part) -> Mapping[str, Tensor | float]:
        """Sums over validation samples in evaluation mode, under autocast, by name; every call returns the same
        names."""

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Results of an evaluation, with "loss" and the family's metric. Default: each sum divided by the sum "items".

        Args:
            sums: sums of `measure` over all validation samples.
        """
        return {
            name: value / sums["items"] if sums["items"] else float("nan")
            for name, value in sums.items()
            if name != "items"
        }

    def begin(self, model: nn.Module, data: Data, begin: Begin) -> None:
        """Prepare what the steps need of the model as it is when a run begins or goes on. Default: nothing.

        Called once by the trainer on every rank, under autocast, with the weights loaded and before the first
        evaluation.

        Args:
            model: the model, in the mode of training.
            data: the data of `prepare`.
            begin: step, folder and ranks.
        """
        return

    def enrich(self, model: nn.Module, batch: Batch, step: int, ranks: Ranks) -> Batch:
        """The whole batch of a step with what the model says of it: sampled answers, scores, numbers of the whole
        batch.

        Called once per step by the trainer, without gradients, under autocast, before items are counted; not in
        evaluations. Ranks that compute take the samples `ranks.rows(0, num_samples(batch))` each and exchange results
        (`ranks.gather`), so that the result does not depend on micro-batches and ranks. Default: unchanged.

        Args:
            model: the model, in the mode of training.
            batch: samples of all ranks, on the CPU, the same on all ranks.
            step: from 0.
            ranks: the ranks, all of which call.

        Returns:
            Samples on the CPU, the same on all ranks.
        """
        return batch

    def num_items(self, batch: Batch) -> int:
        """Number of items in a batch on the CPU, over which the loss is averaged. Default: its samples."""
        return num_samples(batch)

    def progress_items(self, batch: Batch) -> int:
        """Number of the family's items (`Family.items`) in an enriched batch, for progress and rates. Default:
        `num_items`."""
        return self.num_items(batch)

    def num_routed(self, batch: Batch, ranks: Ranks) -> Sequence[int]:
        """Tokens over which the routing losses of each MoE layer are averaged, in layer order; one number stands for
        all layers.

        Args:
            batch: the batch on the CPU.
            ranks: the ranks; if they share sequences, each counts its own positions. Default: an equal part of the
                items.
        """
        return [self.num_items(batch) // ranks.tp_degree]

    def cut(self, batch: Batch) -> Batch:
        """The batch without trailing padding that no sample of any rank needs. Default: unchanged.

        Args:
            batch: the batch on the CPU, the same on all ranks.
        """
        return batch

    def label_of(self, batch: Batch) -> Tensor:
        """Index (B,) int64 in `labels` of each sample; called only if there are labels.

        Raises:
            ConfigError: the task has labels and does not override this method.
        """
        raise ConfigError(
            "family",
            self.config.family,
            "its task defines labels but not label_of",
            "write its label_of, or leave labels empty",
        )

    def baseline(self, data: Data) -> Baseline | None:
        """Baseline that a report compares the model with. Default: None."""
        return None


def micro_batches(task: Task, batch: Batch, size: int, ranks: Ranks) -> Iterator[tuple[slice, Batch]]:
    """Parts of a batch of all ranks: this rank's rows of each micro-batch, and its samples there, cut as all ranks'
    are."""
    count = num_samples(batch)
    for start in range(0, count, size):
        stop = min(start + size, count)
        rows = ranks.rows(start, stop)
        together = task.cut(each_tensor(batch, itemgetter(slice(start, stop))))
        mine = slice(rows.start - start, rows.stop - start)
        yield rows, each_tensor(together, itemgetter(mine))


def num_samples(batch: Batch) -> int:
    """Number of samples of a batch."""
    return len(pytree.tree_leaves(batch)[0])


def each_tensor(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with a function applied to every tensor."""
    return pytree.tree_map(function, batch)
