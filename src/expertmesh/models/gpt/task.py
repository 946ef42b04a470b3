"""Task of GPTs: data, loss and measure of a language model of text or conversations."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from expertmesh.data.corpus import texts
from expertmesh.data.data_progress import Progress, note
from expertmesh.data.ngram import ByteTrigram
from expertmesh.data.text import TextData, text_data
from expertmesh.errors import named
from expertmesh.models.gpt.builder import GPTBuilder
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.task import (
    Baseline,
    Batch,
    Data,
    Loss,
    Part,
    Task,
    each_tensor,
    named_tensors,
)
from expertmesh.models.token_losses import DistillTargets, token_losses
from expertmesh.parallel.ranks import Ranks
from expertmesh.text.new_tokens import named_tokens


class GPTTask(Task):
    """Next-token prediction of text by a GPT; evaluated by bits per byte."""

    config: GPTRunConfig
    builder_class = GPTBuilder
    has_lessons = True
    measures_items = True

    def prepare(self) -> Data:
        """The corpus as tokens; see `text_data`."""
        config = self.config
        _tell_known(config)
        data = text_data(
            config.data,
            vocab_size=config.model.vocab_size,
            seed=config.train.seed,
            objective=config.objective.name,
            tokens=config.tokens,
        )
        self.labels = data.labels if isinstance(data, TextData) else ()
        return data

    def label_of(self, batch: Batch) -> Tensor:
        """Index (B,) in `labels`, the entries of data.path, of the text in which each window begins."""
        label_B: Tensor = batch[2]["label"]
        return label_B

    def num_items(self, batch: Batch) -> int:
        """Number of predicted tokens; in conversations, of the assistant's tokens."""
        counts_BS = named_tensors(batch).get("counts")
        return int(batch[1].numel() if counts_BS is None else counts_BS.sum())

    def cut(self, batch: Batch) -> Batch:
        """Conversations cut to the longest one, rounded up to one of a few lengths that ranks can split.

        Routing groups stay the same: nothing is cut if a group extends over the end of a row.
        """
        is_token_BS = named_tensors(batch).get("is_token")
        if is_token_BS is None:
            return batch
        shape = is_token_BS.shape
        S = shape[-1]
        size = self.config.model.moe.routing_group_size or 1
        parts = self.config.parallel.tp_degree * size
        if S % parts:
            return batch
        longest = int(is_token_BS.view(-1, S).any(0).sum())
        S_cut = min(S, -(-rounded_up(longest) // parts) * parts)
        return each_tensor(batch, lambda x: x[..., :S_cut].contiguous() if x.shape == shape else x)

    def num_routed(self, batch: Batch, ranks: Ranks) -> list[int]:
        """Number of tokens without padding, prompts of conversations included."""
        is_token_BS = named_tensors(batch).get("is_token")
        if is_token_BS is None:
            return [ranks.positions(batch[0]).numel()]
        return [int(ranks.positions(is_token_BS).sum())]

    def loss(self, model: nn.Module, batch: Batch, part: Part) -> Loss:
        """Cross-entropy of the next tokens in nats."""
        (ids_BS, targets_BS, *_), more = batch, named_tensors(batch)
        S, seq_len = ids_BS.shape[1], self.config.data.seq_len
        stride = seq_len if "is_token" in more else None
        token_index = part.token_index(S, ids_BS.device, stride=stride)
        learned = Learned.of(part.positions(targets_BS), more.get("counts"), part)
        call = {"token_index": token_index, "logit_rows_R": learned.rows_R, **masks_of(more)}
        distill = self._distill_targets(ids_BS, learned.rows_R, masks_of(more), part.step)
        if distill is None:
            output = model(ids_BS, targets_R=learned.targets_R, **call)
            return Loss(learned.sum(-output.logprobs_R), output.stats)
        output = model(ids_BS, **call)
        losses_R = token_losses(output.logits_BSV, learned.targets_R, distill=distill, overwrite_logits=True)
        return Loss(learned.sum(losses_R), output.stats)

    def _distill_targets(
        self, ids_BS: Tensor, rows_R: Tensor | None, masks: Mapping[str, Tensor], step: int
    ) -> DistillTargets | None:
        """Teacher logits of a dropless forward pass; None if there is no teacher or its weight is 0 in this step."""
        if self.teacher is None:
            return None
        config = self.config
        weight = config.distill.weight(step, total_steps=config.total_schedule_steps)
        if weight == 0.0:
            return None
        assert isinstance(self.teacher, GPT)
        factor = self.teacher.config.moe.dropless_factor
        with torch.no_grad():
            output = self.teacher(ids_BS, logit_rows_R=rows_R, capacity_factor=factor, **masks)
        return DistillTargets(output.logits_BSV, weight, self.config.distill.temperature)

    def measure(self, model: nn.Module, batch: Batch, part: Part) -> dict[str, Tensor | float]:
        """Sums of cross-entropy in nats, of tokens, and of their bytes of text."""
        (ids_BS, targets_BS, num_bytes_BS, *_), more = batch, named_tensors(batch)
        learned = Learned.of(part.positions(targets_BS), more.get("counts"), part)
        masks = {"logit_rows_R": learned.rows_R, **masks_of(more)}
        output = model(ids_BS, targets_R=learned.targets_R, **masks)
        return {
            "nats": learned.sum(-output.logprobs_R),
            "items": learned.num_items,
            "bytes": part.positions(num_bytes_BS).sum(),
        }

    def evaluation(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Mean cross-entropy per token in nats, and total cross-entropy in bits divided by the bytes of the predicted
        text.

        The end-of-text token costs bits but has no bytes, so the value is an upper bound of the text's bits per byte.
        """
        return {
            "loss": sums["nats"] / sums["items"],
            "bits_per_byte": bits_per_byte(sums["nats"], sums["bytes"]),
        }

    def baseline(self, data: Data) -> Baseline | None:
        """Byte trigram model of the same text; None for conversations."""
        if not isinstance(data, TextData):
            return None
        total = sum(document.num_bytes for document in data.corpus.training)
        counted = Progress("counted for the baseline:", total=total)
        trigram = ByteTrigram.fit(counted.over(texts(data.corpus.training), len))
        value = trigram.bits_per_byte(texts(data.corpus.validation))
        return Baseline("byte trigram with back-off (Witten-Bell)", "trigram model", value)


def _tell_known(config: GPTRunConfig) -> None:
    """Say which of the tokens to add the tokenizer has already."""
    if not config.tokens.add:
        return
    found = named_tokens(Path(str(config.data.encode_with)), config.tokens)
    if found.known:
        special, name = " ".join(filter(found.special.__contains__, found.known)), " ".join(found.known)
        said = "in the tokenizer already, with rows that begin as they are"
        note(f"{named('tokens.add', name)}: {said}; special among them: {special or 'none'}")


class Learned(NamedTuple):
    """The positions of this rank whose next token is learned."""

    rows_R: Tensor | None  # (R,) int64 their indices among the rank's tokens; None: all
    targets_R: Tensor  # (R,) int64 their next tokens
    is_real_R: Tensor | None  # (R,) bool, False for fillers; None: there are none

    @classmethod
    def of(cls, targets_BS: Tensor, counts_BS: Tensor | None, part: Part) -> "Learned":
        """Rows of targets (B, S), those whose counts_BS (all ranks' positions) is True. Does not synchronise."""
        targets_T = targets_BS.flatten()
        if counts_BS is None:
            return cls(None, targets_T, None)
        counts_T = part.positions(counts_BS).flatten()
        # a rank that shares sequences may have fewer than all of the items: the rest is filled up
        size = min(len(counts_T), len(counts_T) if part.num_items is None else part.num_items)
        rows_R = torch.nonzero_static(counts_T, size=size).squeeze(1)
        places_R = torch.arange(size, device=counts_T.device)
        is_real_R = places_R < counts_T.sum()
        rows_R = rows_R.where(is_real_R, 0)
        return cls(rows_R, targets_T[rows_R], is_real_R)

    @property
    def num_items(self) -> Tensor | int:
        """Number of learned positions."""
        return len(self.targets_R) if self.is_real_R is None else self.is_real_R.sum()

    def sum(self, losses_R: Tensor) -> Tensor:
        """Sum of the losses of learned positions."""
        if self.is_real_R is not None:
            losses_R = losses_R.where(self.is_real_R, 0.0)
        return losses_R.sum()


def masks_of(more: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Mask arguments of `GPT.forward` that the batch has: (B, S) document numbers, and (B, S) bool, False for
    padding."""
    names = {"document": "document_BS", "is_token": "token_mask_BS"}
    return {name: more[key] for key, name in names.items() if key in more}


def rounded_up(length: int) -> int:
    """The next of 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ...: four lengths per doubling, so about a fifth more at
    most."""
    step = max(4, 1 << max(0, (length - 1).bit_length() - 3))
    return max(16, -(-length // step) * step)


def bits_per_byte(nats: float, num_bytes: float) -> float:
    """Bits per byte, nats / ln 2 / bytes; NaN for 0 bytes."""
    return nats / math.log(2) / num_bytes if num_bytes else math.nan
