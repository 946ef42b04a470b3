"""Preferences between two answers (`objective.name=dpo`): pairs, their scores, and the losses on them."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from expertmesh.data.pair_data import PairData
from expertmesh.models.family import Metric
from expertmesh.models.gpt.answers import AnswerTask, with_named
from expertmesh.models.gpt.reference import read_scores, score_pairs, write_scores
from expertmesh.models.gpt.task import bits_per_byte
from expertmesh.models.task import Batch, Data, Loss, Part, named_tensors
from expertmesh.objectives.preferences import (
    LOSSES,
    Answers,
    LossNumbers,
    pair_measures,
    pair_sums,
)
from expertmesh.parallel.ranks import Ranks


class PreferenceTask(AnswerTask):
    """Pairs of a chosen and a rejected answer, (B, 2, S); items of the loss are pairs."""

    metric = Metric("accuracy", "accuracy of preferences", "accuracy", higher_is_better=True)

    def begin(self, model: nn.Module, data: Data, *, step: int, folder: Path, ranks: Ranks) -> None:
        """Score all pairs under the reference, the weights that the run begins with, or read the scores of a run that goes on.

        Raises:
            ConfigError: the run has begun, and its scores are missing or damaged.
        """
        assert isinstance(data, PairData)
        if not self.config.objective.has_reference:
            return
        if step:
            data.reference = ranks.on_all(lambda: read_scores(folder, data))
            return

        def score(batch: Batch, part: Part) -> Tensor:
            found = self.scores(model, batch, part)
            return found.per_answer(found.logprobs_R)

        device = next(model.parameters()).device
        scores = score_pairs(self, score, data, device=device, ranks=ranks)
        ranks.on_rank0(lambda: write_scores(folder, scores))
        data.reference = scores

    def enrich(self, model: nn.Module, batch: Batch, step: int, ranks: Ranks) -> Batch:
        """The batch with "pairs_per_token" (B,), the number of pairs for each token of chosen answers in the whole batch, FP64."""
        num_pairs = len(batch[0])
        num_tokens = int(named_tensors(batch)["counts"][:, 0].sum())
        per_token_B = torch.full((num_pairs,), num_pairs / num_tokens, dtype=torch.float64)
        return with_named(batch, pairs_per_token=per_token_B)

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Loss of preferences, and the chosen answers' cross-entropy, a mean over the whole batch's tokens, with its weight."""
        answers, sums, losses_B, stats = self._judged(model, batch, part)
        total = losses_B.sum()
        if weight := self.config.objective.resolved_sft_weight:
            per_token_B = named_tensors(batch)["pairs_per_token"].to(total.dtype)
            total = total - weight * (answers.logprobs_B2[:, 0] * per_token_B).sum()
        return Loss(total, stats, sums)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of the pairs' measures, and bytes of the chosen answers."""
        _, sums, _, _ = self._judged(model, batch, part)
        return {**sums, "bytes": batch[2][:, 0].sum()}

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over pairs, and in evaluations the bits per byte of the chosen answers."""
        found = pair_measures(sums, sft_weight=self.config.objective.resolved_sft_weight)
        if "bytes" in sums:
            found["bits_per_byte"] = bits_per_byte(-sums["logp_chosen"], sums["bytes"])
        return found

    def _judged(
        self, model: nn.Module, batch: Batch, part: Part
    ) -> tuple[Answers, dict[str, Tensor | float], Tensor, tuple[object, ...]]:
        """Scores of pairs, sums of their measures, their losses, and routing statistics."""
        objective, more = self.config.objective, named_tensors(batch)
        found = self.scores(model, batch, part)
        logprobs_B2 = found.per_answer(found.logprobs_R)
        reference_B2 = more["reference"] if objective.has_reference else torch.zeros(())
        answers = Answers(
            logprobs_B2,
            more["counts"].sum(2).to(logprobs_B2.dtype),
            reference_B2.to(logprobs_B2).expand_as(logprobs_B2),
        )
        numbers = LossNumbers(
            objective.resolved_beta, objective.label_smoothing, objective.resolved_gamma
        )
        losses_B = LOSSES[objective.loss](answers, numbers)
        entropies_B2 = found.per_answer(found.entropies_R.detach())
        sums = pair_sums(answers, entropies_B2, losses_B, numbers, loss=objective.loss)
        return answers, {**sums, "items": float(len(losses_B))}, losses_B, found.stats
