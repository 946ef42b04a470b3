"""Pairs of answers as the data of a run: a chosen and a rejected answer to one prompt in every sample."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from expertmesh.config.text import TextConfig
from expertmesh.data.conversations import ConversationData, LearnedRow, Rows, rows_of_talk
from expertmesh.data.corpus import Corpus
from expertmesh.data.files import LeftOut
from expertmesh.data.pairs import SIDES
from expertmesh.data.plain_completions import PlainForm
from expertmesh.text.chat import MESSAGES, NOT_LEARNED, ChatFormat, Conversation

_EQUAL = "have the same chosen and rejected answer, or the same in their first tokens"
_SEVERAL = "have answers that the chat format writes as several sequences"


class PairData(ConversationData):
    """Pairs of answers of a corpus; fills the cache unless it has them. `how`: see `ConversationData`."""

    version = (3, "pairs 1")
    per_sample = 2

    def __init__(self, corpus: Corpus, config: TextConfig, **how: Any) -> None:
        # log-probabilities (N, 2) of the answers under the reference, FP64, for both splits by name; empty without any
        self.reference: Mapping[str, Tensor] = {}
        super().__init__(corpus, config, **how)

    def samples(self, side: str, which: Sequence[int]) -> Rows:
        """Pairs by their indices: tensors (B, 2, S), chosen answers in the first row of each sample and rejected ones
        in the second.

        Further entries are "place" (B, K), the indices of the pairs in each sample (K is 1, or larger where rows are
        packed; -1: there is none), and "reference" (B, K, 2), if there is one.
        """
        ids, targets, more = super().samples(side, which)
        pairs = {name: x.unflatten(0, (-1, 2)) for name, x in more.items()}
        split = self.split(side)
        place_BK = torch.full((len(which), split.most_members), -1, dtype=torch.int64)
        for row, chosen in enumerate(which):
            members = split.members(chosen)
            place_BK[row, : len(members)] = torch.tensor(members)
        pairs["place"] = place_BK
        if side in self.reference:
            pairs["reference"] = self.reference[side][place_BK.clamp_min(0)]
        return ids.unflatten(0, (-1, 2)), targets.unflatten(0, (-1, 2)), pairs

    def num_pairs(self, side: str) -> int:
        """Number of pairs of the training or validation split."""
        return (len(self.split(side).starts) - 1) // 2

    @staticmethod
    def rows_of(
        talk: Conversation, name: str, form: ChatFormat | PlainForm, seq_len: int, left_out: LeftOut
    ) -> Iterator[LearnedRow]:
        """Two sequences, of the chosen and the rejected answer, or none."""
        prompt = [_unlearned(message) for message in talk[MESSAGES]]
        rest = {key: value for key, value in talk.items() if key not in SIDES}
        rows: list[LearnedRow] = []
        said = LeftOut()
        for side in SIDES:
            whole = {**rest, MESSAGES: [*prompt, *talk[side]]}
            found = list(rows_of_talk(whole, name, form, seq_len, said))
            if len(found) != 1:
                left_out.add(_SEVERAL if found else next(iter(said.counts)), name)
                return
            rows += found
        if rows[0] == rows[1]:
            left_out.add(_EQUAL, name)
            return
        for reason in said.counts:
            left_out.add(reason, name)
        yield from rows


def _unlearned(message: Mapping[str, object]) -> Mapping[str, object]:
    """A message of a prompt, whose answers are not learned."""
    return {**message, NOT_LEARNED: True} if message["role"] == "assistant" else message
