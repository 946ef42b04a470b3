"""A step as numbers, and as the tensors that all layers share: made once, in one buffer on the host."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.engine.block_pool import ROOT
from expertmesh.engine.drawing import SamplingNumbers
from expertmesh.engine.packed import WHOLE, packed, views
from expertmesh.ops.attention.pages import PagedKeys
from expertmesh.ops.sampling import SamplingBatch


@dataclass(frozen=True)
class BatchChunk:
    """Tokens of one sequence in a step, as numbers."""

    ids: Sequence[int]
    start: int  # position of the first token in the sequence
    blocks: Sequence[int]  # block table of the sequence
    root: int = ROOT  # root prefix of the sequence, which identifies its adapter; see `LoadedAdapter`


@dataclass(frozen=True)
class StepBatch:
    """Inputs of a step, as numbers."""

    chunks: tuple[BatchChunk, ...]  # chunks whose tokens are concatenated
    rows: tuple[int, ...]  # indices of tokens whose logits are needed
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) blocks that are copied first


class Padding(NamedTuple):
    """Sizes to which a step is padded, so that equal shapes are replayed."""

    width: int  # blocks in the block table of a sequence
    # sequences of one token each, which is also the number of tokens and rows; None: no sequence is added
    num: int | None = None
    spare_slot: int = 0  # cache slot that the keys and values of added sequences are written to


@dataclass(frozen=True)
class StepTensors:
    """Inputs of a step on the device of the model; all but `more` are views of `words`."""

    ids_T: Tensor  # (T,) token ids
    positions_T: Tensor  # (T,) position of each token in its sequence
    slots_T: Tensor  # (T,) cache slot of each token
    keys: PagedKeys  # rows, numbers of keys and block table of the sequences
    rows_R: Tensor  # (R,) indices of tokens whose logits are needed
    sampling: SamplingBatch | None  # sampling parameters of the rows that are drawn; None: none were given
    more: Sequence[Tensor]  # further numbers of the host
    words: Tensor  # buffer of the others
    padding: Padding | None  # sizes to which the step is padded; None: it is not
    _layout: "_Layout"

    @property
    def token_mask(self) -> Tensor | None:
        """(T,) bool, False for padding; None: there is none."""
        return None if self.padding is None or self.padding.num is None else self.keys.num_keys_B > 0

    def on(self, words: Tensor) -> "StepTensors":
        """Tensors of this step in another buffer of the same size."""
        return self._layout.tensors(words, views(words, self._layout.sizes))


class _Layout(NamedTuple):
    """Places of the parts of a step in its buffer, and numbers that the host keeps."""

    sizes: list[tuple[str, int]]
    num_sequences: int
    most_queries: int
    drawing: SamplingNumbers | None
    padding: Padding | None

    def tensors(self, words: Tensor, parts: Sequence[Tensor], more: Sequence[Tensor] = ()) -> StepTensors:
        ids_T, positions_T, slots_T, starts_S, stops_B, table_N, rows_R, *sampling = parts
        keys = PagedKeys(starts_S, stops_B, table_N.view(self.num_sequences, -1), self.most_queries)
        return StepTensors(
            ids_T,
            positions_T,
            slots_T,
            keys,
            rows_R,
            None if self.drawing is None else self.drawing.batch(sampling),
            more,
            words,
            self.padding,
            self,
        )


def step_tensors(
    batch: StepBatch,
    block_size: int,  # tokens of a block
    device: torch.device,  # device of the model
    *,
    drawing: SamplingNumbers | None = None,  # sampling parameters; padded, if the step is
    more: Sequence[array] = (),  # further numbers, for `StepTensors.more`
    padding: Padding | None = None,
) -> StepTensors:
    """Tensors of a step, copied to the device at once.

    Args:
        padding: sizes to which the step is padded; where sequences are added, every chunk has one token, which is a
            row, and there may be no chunk.
    """
    chunks = batch.chunks
    stops = [one.start + len(one.ids) for one in chunks]
    width = max(-(-stop // block_size) for stop in stops) if padding is None else padding.width
    ids, positions, slots, table = (array(WHOLE) for _ in range(4))
    starts, rows = array(WHOLE, [0]), array(WHOLE, batch.rows)
    for one, stop in zip(chunks, stops, strict=True):
        ids.extend(one.ids)
        own = range(one.start, stop)
        positions.extend(own)
        slots.extend([one.blocks[i // block_size] * block_size + i % block_size for i in own])
        starts.append(len(ids))
        pages = one.blocks[:width]
        table.extend(pages)
        table.extend([0] * (width - len(pages)))
    if padding is not None and padding.num is not None:
        num = padding.num - len(chunks)
        zeros = array(WHOLE, bytes(8 * num))
        for part in (ids, positions, stops):
            part.extend(zeros)
        slots.extend([padding.spare_slot] * num)
        table.extend(array(WHOLE, bytes(8 * num * width)))
        starts.extend(range(len(chunks) + 1, padding.num + 1))
        rows.extend(range(len(chunks), padding.num))
    own_parts = (ids, positions, slots, starts, array(WHOLE, stops), table, rows)
    if drawing is not None:
        own_parts += drawing.parts
    words, tensors = packed([*own_parts, *more], device)
    layout = _Layout(
        [(part.typecode, len(part)) for part in own_parts],
        len(stops),
        max((len(one.ids) for one in chunks), default=1),
        drawing,
        padding,
    )
    size = sum(size for _, size in layout.sizes)
    first = len(own_parts)
    return layout.tensors(words[:size], tensors[:first], tensors[first:])
