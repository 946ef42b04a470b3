"""Preferences between two answers (`objective.name=dpo`): pairs, their scores, and the losses on them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from expertmesh.data.pair_data import PairData
from expertmesh.models.family import Metric
from expertmesh.models.gpt.answer_task import AnswerTask, loss_once, once, with_named
from expertmesh.models.gpt.reference import places_of, read_scores, score_pairs, write_scores
from expertmesh.models.gpt.task import bits_per_byte
from expertmesh.models.task import Batch, Begin, Data, Loss, Part, named_tensors
from expertmesh.moe.types import RoutingStats
from expertmesh.objectives.preferences import (
    LOSSES,
    LossNumbers,
    PairScores,
    pair_measures,
    pair_sums,
)
from expertmesh.parallel.ranks import Ranks


class PreferenceTask(AnswerTask):
    """Pairs of a chosen and a rejected answer, (B, 2, S); items of the loss are pairs."""

    metric = Metric("accuracy", "accuracy of preferences", "accuracy", higher_is_better=True)

    def begin(self, model: nn.Module, data: Data, begin: Begin) -> None:
        """Score all pairs under the reference, the weights that the run begins with, or read the scores of a run that
        goes on."""
        assert isinstance(data, PairData)
        if not self.config.objective.has_reference:
            return
        ranks, folder = begin.ranks, begin.folder
        if begin.step:
            data.reference = ranks.on_all(lambda: read_scores(folder, data))
            return

        def score(batch: Batch, part: Part) -> Tensor:
            found = self.scores(model, batch, part)
            return _per_pair(found.at_positions(found.logprobs_R), named_tensors(batch))

        device = next(model.parameters()).device
        scores = score_pairs(self, score, data, device=device, ranks=ranks)
        ranks.on_rank0(lambda: write_scores(folder, scores))
        data.reference = scores

    def num_items(self, batch: Batch) -> int:
        """Number of pairs."""
        return len(places_of(batch))

    def enrich(self, model: nn.Module, batch: Batch, step: int, ranks: Ranks) -> Batch:
        """The batch with "pairs_per_token" (B,), the number of pairs for each token of chosen answers in the whole
        batch, FP64."""
        num_tokens = int(named_tensors(batch)["counts"][:, 0].sum())
        ratio = self.num_items(batch) / num_tokens
        per_token_B = torch.full((len(batch[0]),), ratio, dtype=torch.float64)
        return with_named(batch, pairs_per_token=per_token_B)

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Loss of preferences, and the chosen answers' cross-entropy, a mean over the whole batch's tokens, with its
        weight."""
        answers, sums, losses_B, stats = self._judged(model, batch, part)
        total = losses_B.sum()
        if weight := self.config.objective.resolved_sft_weight:
            per_token = named_tensors(batch)["pairs_per_token"][0].to(total.dtype)
            total = total - weight * answers.logprobs_B2[:, 0].sum() * per_token
        return loss_once(Loss(total, stats, sums), part.ranks)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of the pairs' measures, and bytes of the chosen answers."""
        _, sums, _, _ = self._judged(model, batch, part)
        return once({**sums, "bytes": batch[2][:, 0].sum()}, part.ranks)

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Means over pairs, and in evaluations the bits per byte of the chosen answers."""
        found = pair_measures(sums, sft_weight=self.config.objective.resolved_sft_weight)
        if "bytes" in sums:
            found["bits_per_byte"] = bits_per_byte(-sums["logp_chosen"], sums["bytes"])
        return found

    def _judged(
        self, model: nn.Module, batch: Batch, part: Part
    ) -> tuple[PairScores, dict[str, Tensor | float], Tensor, Sequence[RoutingStats]]:
        """Scores of pairs, sums of their measures, their losses, and routing statistics."""
        objective, more = self.config.objective, named_tensors(batch)
        found = self.scores(model, batch, part)
        logprobs_B2 = _per_pair(found.at_positions(found.logprobs_R), more)
        reference_B2 = torch.zeros_like(logprobs_B2)
        if objective.has_reference:
            reference_B2 = _real(more["reference"].flatten(0, 1), more).to(logprobs_B2)
        lengths_B2 = _per_pair(more["counts"].to(logprobs_B2.dtype), more)
        answers = PairScores(logprobs_B2, lengths_B2, reference_B2)
        numbers = LossNumbers(objective.resolved_beta, objective.label_smoothing, objective.resolved_gamma)
        losses_B = LOSSES[objective.loss](answers, numbers)
        entropies_B2 = _per_pair(found.at_positions(found.entropies_R.detach()), more)
        sums = pair_sums(answers, entropies_B2, losses_B, numbers, loss=objective.loss)
        return answers, {**sums, "items": float(len(losses_B))}, losses_B, found.stats


def _per_pair(values_B2S: Tensor, more: Mapping[str, Tensor]) -> Tensor:
    """Sums (P, 2) over the answers of each pair, sample by sample; pair k of a packed row is its document k + 1."""
    K = more["place"].shape[1]
    if K == 1:
        return values_B2S.sum(2)
    document_B2S = more["document"]
    sums = [values_B2S.where(document_B2S == k, 0.0).sum(2) for k in range(1, K + 1)]
    return _real(torch.stack(sums, 1).flatten(0, 1), more)


def _real(values_N2: Tensor, more: Mapping[str, Tensor]) -> Tensor:
    """Rows (P, 2) of values (B * K, 2) that have a pair; synchronises with a GPU where samples are packed."""
    place_BK = more["place"]
    return values_N2 if place_BK.shape[1] == 1 else values_N2[place_BK.flatten() >= 0]
