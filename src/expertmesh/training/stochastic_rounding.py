"""Random words for stochastic rounding of moments: a function of the tensor's name, the step and the element's index
only.

A resumed run and every layout over ranks therefore draw the same words.

The word of the element at row i (all axes but the last, flattened) and column j of a tensor t in step s is

    Philox(s, row i) + Philox(s, column j) + BLAKE2(t, s)   modulo 2^32.

This costs one addition per element, where a Philox word per element would cost about a hundred operations. Words are
uniform, and any two words of a step are independent, so the variance of every sum of rounding errors equals the
variance for independent errors.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.ops.philox import philox4x32
from expertmesh.parallel.shard_place import Place
from expertmesh.training.workspace import Workspace

_MASK32 = 0xFFFFFFFF
_ROWS, _COLUMNS = 1, 2
"""Streams of the Philox counter."""
_KEY = 0x6D6F6D65, 0x6E747321


@dataclass(frozen=True)
class Words:
    """Random words of one rank's shard of a tensor, by its rows and columns."""

    rows: Tensor  # (R, 1) int32
    columns: Tensor  # (C,) int32

    def of(self, part: slice, space: Workspace) -> Tensor:
        """Words of some rows, (rows, C) int32, uniform over all int32 values."""
        some = self.rows[part]
        table = space.table("words", (len(some), len(self.columns)), torch.int32)
        return torch.add(some, self.columns, out=table)


class WordTables:
    """Row and column words of one step, computed at once for all shards. `step`: step count of the tensors, from 1."""

    def __init__(self, step: int, places: Iterable[tuple[Place, torch.device]]) -> None:
        self.step = step
        self._tables: dict[tuple[Place, torch.device], tuple[Tensor, Tensor]] = {}
        of_device: dict[torch.device, list[Place]] = {}
        for place, device in dict.fromkeys(places):
            of_device.setdefault(device, []).append(place)
        for device, found in of_device.items():
            self._add(found, device)

    def _add(self, places: list[Place], device: torch.device) -> None:
        indices = [index for place in places for index in _rows_and_columns(place, device)]
        streams = [_ROWS, _COLUMNS] * len(places)
        index = torch.cat(indices)
        stream = torch.cat([torch.full_like(i, s) for i, s in zip(indices, streams, strict=True)])
        word = torch.tensor([self.step & _MASK32, *_KEY], dtype=torch.int64, device=device)
        drawn = philox4x32(index & _MASK32, (index >> 32) & _MASK32, word[0], stream, word[1], word[2])
        words = drawn[:, 0].to(torch.int32).split([len(i) for i in indices])
        for place, rows, columns in zip(places, words[::2], words[1::2], strict=True):
            self._tables[place, device] = rows, columns

    def words(self, name: str, place: Place, device: torch.device) -> Words:
        """Words of a tensor."""
        rows, columns = self._tables[place, device]
        digest = hashlib.blake2b(f"{self.step} {name}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "little", signed=True)
        return Words((rows + own).unsqueeze(1), columns)


def _rows_and_columns(place: Place, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of the shard's rows and columns in the whole tensor."""
    row = torch.zeros((), dtype=torch.int64, device=device)
    for length, start, size in zip(place.shape[:-1], place.offsets[:-1], place.sizes[:-1], strict=True):
        along = torch.arange(start, start + size, device=device)
        row = (row * length).unsqueeze(-1) + along
    first = place.offsets[-1]
    columns = torch.arange(first, first + place.sizes[-1], device=device)
    return row.reshape(-1), columns
