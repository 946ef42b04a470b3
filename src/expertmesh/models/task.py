"""Model families, the half with torch: what trainer, report and inference need of a model, its data and its loss.

A family of one's own is a `Task` with four methods (`prepare`, `build`, `loss`, `measure`), named by an
`expertmesh.models.registry.Family`. docs/extending.md writes one.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from expertmesh.comm.world import World
from expertmesh.config.run import RunConfig
from expertmesh.errors import ConfigError
from expertmesh.models.classifier import Classifier
from expertmesh.models.decoder import CausalLM, Translation
from expertmesh.moe.types import RoutingStats
from expertmesh.parallel.apply import degrees_of, parallelize
from expertmesh.parallel.construct import give_memory
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
        num_items: counted before these samples went to the device: in training by `Task.num_items`, in evaluations by
            `Task.num_measured`; None: they were not.
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
    """A model, its data, its loss and its measure, for one run.

    Args:
        config: the run's configuration.
    """

    config: Any
    has_lessons = False
    """Whether `loss` listens to a teacher."""
    is_built_empty = False
    """Whether `build` makes a model without memory on "meta", whose `init_weights(seed)` then draws the weights."""
    labels: tuple[str, ...] = ()
    """Kinds of samples, languages or domains, for which the use of the experts is recorded apart; set by `prepare`."""
    teacher: nn.Module | None = None
    """A model of the family in evaluation mode, placed as the model is, where distill.teacher names one."""
    bytes_beside: float = 0.0
    """Memory of a rank that the teacher's weights are going to take beside the model; set before `place`."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config

    def lesson_weight(self, step: int) -> float:
        """Weight of what the teacher says in a step; 0: it need not be asked."""
        config: RunConfig = self.config
        if self.teacher is None:
            return 0.0
        return config.distill.weight(step, total_steps=config.total_schedule_steps)

    @abstractmethod
    def prepare(self) -> Data:
        """Find the data. Every rank calls, rank 0 first, so that it can fill a cache.

        Raises:
            ConfigError: there is something wrong with them.
        """

    @abstractmethod
    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> nn.Module:
        """The whole model with its initial weights, which depend on the run's seed only: torch's default generator is seeded.

        Args:
            device: the device of the parameters.
            dtype: the type of the parameters.
        """

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """The loss of some samples in training mode, under autocast.

        Args:
            model: the model as `place` returned it.
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

    def num_measured(self, batch: Batch) -> int | None:
        """Items in some validation samples on the CPU, where `measure` needs their number on the host; here, it does not."""
        return None

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

    def check(self, num_ranks: int) -> None:
        """Whether the run fits so many ranks, before anything is built.

        Raises:
            ConfigError: it does not, or asks for something that this family cannot do.
        """
        degrees_of(self.config.parallel, num_ranks=num_ranks)
        for name, value in (
            ("parallel.tp_degree", self.config.parallel.tp_degree),
            ("train.activation_checkpointing", self.config.train.activation_checkpointing),
        ):
            if value > 1 or value is True:
                raise ConfigError(
                    name, value, f"family {self.config.family} has no such thing", "leave it out"
                )

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """Modules whose dense parameters are gathered together, one after the other; here, none but the whole model."""
        return ()

    def place(self, *, device: torch.device, dtype: torch.dtype, ranks: Ranks) -> nn.Module:
        """The model with its initial weights; spread over the ranks if there are several."""
        offload, world = self.config.parallel.offload, ranks.world
        if world is None:
            return self.build(device="cpu" if offload else device, dtype=dtype)

        def spread(model: nn.Module) -> None:
            self.spread(model, world)

        return self.build_spread(spread, device=device, dtype=dtype, offload=offload)

    def build_spread(
        self,
        spread: Callable[[nn.Module], None],
        *,
        device: torch.device,
        dtype: torch.dtype,
        offload: bool = False,
    ) -> nn.Module:
        """The model with its initial weights, spread over ranks.

        Where `is_built_empty`, no rank ever has all of it; else every rank builds the whole model first.

        Args:
            spread: does it, in place.
            device: that computes.
            dtype: of the parameters.
            offload: parameters rest in host memory.
        """
        home, is_empty = "cpu" if offload else device, self.is_built_empty
        model = self.build(device="meta" if is_empty else home, dtype=dtype)
        spread(model)
        if is_empty:
            give_memory(model, device=device, offload=offload)
            cast(Any, model).init_weights(self.config.train.seed)
        return model

    def spread(self, model: nn.Module, world: World) -> None:
        """Spread a model over ranks, in place."""
        parallelize(
            model,
            self.config.parallel,
            world=world,
            blocks=self.blocks(model),
            bytes_beside=self.bytes_beside,
        )

    def inherited(self, model: nn.Module, begin: RunConfig) -> Mapping[str, Tensor]:
        """What a model takes from the run that it begins with (train.init_from), by name; here, everything.

        Args:
            model: as `place` returned it.
            begin: that run's configuration.
        """
        return model.state_dict()

    def baseline(self, data: Data) -> Baseline | None:
        """What a report compares the model with; here, nothing."""
        return None

    def decoder(self, model: nn.Module) -> CausalLM:
        """The model as the decoding engine wants it.

        Raises:
            ConfigError: models of this family generate nothing; so here.
        """
        raise ConfigError(
            f"family {self.config.family}: its models generate no text; use gpt, or seq2seq to translate"
        )

    def translation(self, tokenizer: Any, *, to: str) -> Translation:
        """How a text is handed to the `decoder`, which is an encoder-decoder, to be translated.

        Args:
            tokenizer: of the run.
            to: language that is wanted.

        Raises:
            ConfigError: models of this family translate nothing (so here), or not into this language.
        """
        raise ConfigError(
            f"family {self.config.family}: its models translate nothing; use one that does, for example seq2seq"
        )

    def classifier(self, model: nn.Module) -> Classifier:
        """The model as classification of images wants it.

        Raises:
            ConfigError: models of this family classify no images; so here.
        """
        raise ConfigError(
            f"family {self.config.family}: its models classify no images; use one that does, for example swin"
        )


def num_samples(batch: Batch) -> int:
    """Samples of a batch."""
    return len(pytree.tree_leaves(batch)[0])


def each_tensor(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with a function applied to every tensor."""
    return pytree.tree_map(function, batch)
