"""Random words for rounding a moment up or down: a function of the tensor's name, the step and the element's place, nothing else.

So a run that goes on has those of the run that went straight, and every layout over ranks has the same ones.

The word of the element at row i (all axes but the last, flattened) and column j of a tensor t in step s is

    Philox(s, row i) + Philox(s, column j) + BLAKE2(t, s)   modulo 2^32,

one addition where a word of its own would be a hundred operations. Words are uniform, and any two of a step are
independent, so that the variance of every sum of rounding errors is that of independent ones.
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
"""Streams of the counter."""
_KEY = 0x6D6F6D65, 0x6E747321


@dataclass(frozen=True)
class Words:
    """The words of one rank's part of a tensor, by its rows and columns.

    Attributes:
        rows: (R, 1) int32.
        columns: (C,) int32.
    """

    rows: Tensor
    columns: Tensor

    def of(self, part: slice, space: Workspace) -> Tensor:
        """Those of some rows, (rows, C) int32, uniform over all of them.

        Args:
            part: the rows.
            space: for the table.
        """
        some = self.rows[part]
        table = space.table("words", (len(some), len(self.columns)), torch.int32)
        return torch.add(some, self.columns, out=table)


class WordTables:
    """What the words of one step are added up from, computed at once for all places that tensors lie in.

    Args:
        step: of the tensors' own, from 1.
        places: where they lie, on which device.
    """

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
        drawn = philox4x32(
            index & _MASK32, (index >> 32) & _MASK32, word[0], stream, word[1], word[2]
        )
        words = drawn[:, 0].to(torch.int32).split([len(i) for i in indices])
        for place, rows, columns in zip(places, words[::2], words[1::2], strict=True):
            self._tables[place, device] = rows, columns

    def words(self, name: str, place: Place, device: torch.device) -> Words:
        """Those of a tensor.

        Args:
            name: of the parameter in the model.
            place: one of those that were given.
            device: see there.
        """
        rows, columns = self._tables[place, device]
        digest = hashlib.blake2b(f"{self.step} {name}".encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "little", signed=True)
        return Words((rows + own).unsqueeze(1), columns)


def _rows_and_columns(place: Place, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers of the part's rows and columns in the whole."""
    row = torch.zeros((), dtype=torch.int64, device=device)
    for length, start, size in zip(
        place.shape[:-1], place.offsets[:-1], place.sizes[:-1], strict=True
    ):
        along = torch.arange(start, start + size, device=device)
        row = (row * length).unsqueeze(-1) + along
    first = place.offsets[-1]
    columns = torch.arange(first, first + place.sizes[-1], device=device)
    return row.reshape(-1), columns
