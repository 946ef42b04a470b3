"""Base of the objectives on answers: a sample is a group of G answers to a prompt, and what counts is how probable each
is."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.config.moe import MoEConfig
from expertmesh.data.data_progress import note
from expertmesh.errors import named
from expertmesh.models.gpt.task import GPTTask, Learned, masks_of
from expertmesh.models.task import Batch, Loss, Part, named_tensors
from expertmesh.moe.types import RoutingStats
from expertmesh.parallel.ranks import Ranks

_OF_TRAINING = (
    *("router_noise", "input_jitter", "input_dropout", "expert_output_masking"),
    *("capacity_factor", "max_capacity_factor"),
)
"""Options of experts that change training alone."""


class AnswerScores(NamedTuple):
    """Scores of the learned tokens of some samples, in flat rows, as `models.scored` gives them."""

    logprobs_R: Tensor  # (R,) log-probabilities, FP32 or FP64; 0 for fillers
    entropies_R: Tensor  # (R,) entropies in nats; 0 for fillers
    rows_R: Tensor  # (R,) int64 place of each among the B * G * S positions
    shape: tuple[int, int, int]  # B, G, S
    stats: tuple[RoutingStats, ...]  # routing statistics of every MoE layer

    @property
    def answers(self) -> Tensor:
        """(R,) int64 answer of each row, among the B * G."""
        return self.rows_R // self.shape[-1]

    def at_positions(self, values_R: Tensor) -> Tensor:
        """(B, G, S) values of rows at their positions, 0 elsewhere."""
        B, G, S = self.shape
        # each position has one row, and fillers add 0: any order of additions gives the same bits
        return values_R.new_zeros(B * G * S).index_add(0, self.rows_R, values_R).view(B, G, S)


class AnswerTask(GPTTask):
    """Task whose samples are groups of answers.

    A batch is (ids, targets, {"counts", "is_token", ...}) with tensors (B, G, S), which the model sees as (B * G, S); a
    cut of the batch never parts a group. `counts` is True where the next token is learned: the answer and its end. The
    model computes as in evaluation, dropless, in training, too, so that scores and generation agree.
    """

    evaluates = True

    def prepare(self) -> Any:
        """The data; options of the model that only other objectives read are told."""
        data = super().prepare()
        moe, usual = self.config.model.moe, MoEConfig()
        idle = [name for name in _OF_TRAINING if getattr(moe, name) != getattr(usual, name)]
        if idle:
            names = ", ".join(str(named(f"model.moe.{name}", getattr(moe, name))) for name in idle)
            why = named("objective.name", self.config.objective.name)
            note(f"{names}: without effect, because {why} computes as in evaluation")
        return data

    def scores(self, model: nn.Module, batch: Batch, part: Part) -> AnswerScores:
        """Scores of the learned tokens, on all positions also where ranks share sequences; differentiable.

        Args:
            part: their place, with the number of their learned tokens, if it is known, as `num_items`.
        """
        (ids_AS, targets_AS, *_), more = answers_of(batch)
        learned = Learned.of(part.positions(targets_AS), more["counts"], part)
        assert learned.rows_R is not None and learned.is_real_R is not None
        output = model(
            ids_AS,
            targets_R=learned.targets_R,
            logit_rows_R=learned.rows_R,
            scoring={"entropy": True},
            capacity_factor=self.config.model.moe.dropless_factor,
            **masks_of(more),
        )
        B, G, _ = batch[0].shape
        S = part.positions(ids_AS).shape[1]
        own = AnswerScores(
            output.logprobs_R.where(learned.is_real_R, 0.0),
            output.entropies_R.where(learned.is_real_R, 0.0),
            learned.rows_R,
            (B, G, S),
            output.stats,
        )
        return own if part.ranks.tp_degree == 1 else _joined(own, targets_AS, more["counts"], part)

    def progress_items(self, batch: Batch) -> int:
        """Number of learned tokens."""
        return super().num_items(batch)

    def num_items(self, batch: Batch) -> int:
        """Number of samples."""
        return len(batch[0])

    def num_routed(self, batch: Batch, ranks: Ranks) -> list[int]:
        """Number of tokens without padding."""
        ids, more = answers_of(batch)
        return super().num_routed((*ids, more), ranks)


def _joined(own: AnswerScores, targets_AS: Tensor, counts_AS: Tensor, part: Part) -> AnswerScores:
    """Scores of all ranks that share the sequences, whose answers are then whole."""
    at_AS2 = torch.stack([own.at_positions(x_R).flatten(0, 1) for x_R in own[:2]], -1)
    whole_A2 = part.ranks.join_positions(at_AS2).flatten(0, 1)
    learned = Learned.of(targets_AS, counts_AS, replace(part, ranks=Ranks()))
    assert learned.rows_R is not None and learned.is_real_R is not None
    scores_R2 = whole_A2[learned.rows_R].where(learned.is_real_R[:, None], 0.0)
    B, G, _ = own.shape
    shape = B, G, targets_AS.shape[1]
    logprobs_R, entropies_R = scores_R2.unbind(1)
    return AnswerScores(logprobs_R, entropies_R, learned.rows_R, shape, own.stats)


def once(sums: Mapping[str, Tensor | float], ranks: Ranks) -> dict[str, Tensor | float]:
    """Sums over answers, counted once: ranks that share sequences compute them alike."""
    return {name: value * ranks.counted for name, value in sums.items()}


def loss_once(loss: Loss, ranks: Ranks) -> Loss:
    """A loss of whole answers, counted once: the losses and gradients of all ranks add up to it."""
    return Loss(loss.total * ranks.counted, loss.stats, once(loss.sums, ranks))


def answers_of(batch: Batch) -> tuple[tuple[Tensor, ...], Mapping[str, Tensor]]:
    """Tensors (B * G, S) of a batch with tensors (B, G, S), as a tuple and by name; others are left out of the
    names."""
    named: Mapping[str, Any] = named_tensors(batch)
    shape = batch[0].shape
    flat = tuple(x.flatten(0, 1) for x in batch if isinstance(x, Tensor))
    return flat, {key: x.flatten(0, 1) for key, x in named.items() if x.shape == shape}


def with_named(batch: Batch, **more: Tensor) -> Batch:
    """A batch with further tensors by name, whose first axis is the sample."""
    plain = tuple(x for x in batch if isinstance(x, Tensor))
    return (*plain, {**named_tensors(batch), **more})
