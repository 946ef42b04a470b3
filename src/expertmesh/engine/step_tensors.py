"""A step as numbers, and as the tensors that all layers share: made once, in one buffer on the host."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.engine.block_pool import ROOT
from expertmesh.ops.attention.pages import PagedKeys


@dataclass(frozen=True)
class BatchChunk:
    """Tokens of one sequence in a step, as numbers.

    Attributes:
        ids: token ids.
        start: position of the first token in the sequence.
        blocks: block table of the sequence.
        root: root prefix of the sequence, which identifies its adapter; see `LoadedAdapter`.
    """

    ids: Sequence[int]
    start: int
    blocks: Sequence[int]
    root: int = ROOT


@dataclass(frozen=True)
class StepBatch:
    """Inputs of a step, as numbers.

    Attributes:
        chunks: chunks whose tokens are concatenated.
        rows: indices of tokens whose logits are needed.
        copies: (from, to) blocks that are copied first.
    """

    chunks: tuple[BatchChunk, ...]
    rows: tuple[int, ...]
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class StepTensors:
    """Inputs of a step on the device of the model.

    Attributes:
        ids_T: (T,) token ids.
        positions_T: (T,) position of each token in its sequence.
        slots_T: (T,) cache slot of each token.
        keys: rows, numbers of keys and block table of the sequences.
        rows_R: (R,) indices of tokens whose logits are needed.
    """

    ids_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    keys: PagedKeys
    rows_R: Tensor


def step_tensors(batch: StepBatch, block_size: int, device: torch.device) -> StepTensors:
    """Tensors of a step, copied to the device at once.

    Args:
        batch: the step.
        block_size: tokens of a block.
        device: device of the model.
    """
    chunks = batch.chunks
    stops = [one.start + len(one.ids) for one in chunks]
    width = max(-(-stop // block_size) for stop in stops)
    ids, positions, slots, table = (array("q") for _ in range(4))
    starts = array("q", [0])
    for one, stop in zip(chunks, stops, strict=True):
        ids.extend(one.ids)
        own = range(one.start, stop)
        positions.extend(own)
        slots.extend([one.blocks[i // block_size] * block_size + i % block_size for i in own])
        starts.append(len(ids))
        pages = one.blocks[:width]
        table.extend(pages)
        table.extend([0] * (width - len(pages)))
    parts = (ids, positions, slots, starts, array("q", stops), table, array("q", batch.rows))
    words = array("q")
    for part in parts:
        words.extend(part)
    whole = torch.frombuffer(words, dtype=torch.int64).to(device)
    sizes = [len(one) for one in parts]
    ids_T, positions_T, slots_T, starts_S, stops_B, table_N, rows_R = whole.split(sizes)
    keys = PagedKeys(starts_S, stops_B, table_N.view(len(chunks), width))
    return StepTensors(ids_T, positions_T, slots_T, keys, rows_R)
