"""Files with experts in MXFP4, as of gpt-oss: widened to BF16, a part at a time.

A matrix NAME (E, K, N) of transformers is NAME_blocks (E, N, K / 32, 16), two 4-bit values in a byte, and NAME_scales
(E, N, K / 32), the exponents of two for 32 values each, plus 127 (OCP Microscaling Formats, 5.3.3 and 5.4).
"""

from pathlib import Path

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box
from expertmesh.checkpoints.safetensors import Entry, HubFiles
from expertmesh.errors import CheckpointError

_BLOCK = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the E2M1 codes 0 to 7; codes 8 to 15 are their negatives."""


class Mxfp4Files(HubFiles):
    """The tensors of a folder by name, blocks and scales as one BF16 matrix.

    Args:
        folder: see `HubFiles`.

    Raises:
        ConfigError: see `HubFiles`.
        CheckpointError: see `HubFiles`; or blocks and scales do not fit each other, or a matrix is there twice.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._packed: dict[str, tuple[Entry, Entry]] = {}
        for name in [n for n in self.entries if n.endswith("_blocks")]:
            matrix = name.removesuffix("_blocks")
            scales = self.entries.pop(f"{matrix}_scales", None)
            blocks = self.entries.pop(name)
            if scales is None or not _fit(blocks, scales):
                raise CheckpointError(
                    f"{folder}: {name} has no {matrix}_scales of uint8, one per 32 numbers, beside it; restore the files from the hub"
                )
            if matrix in self.entries:
                raise CheckpointError(
                    f"{folder}: has both {matrix} and {name} for one tensor of the model; take one of them away"
                )
            E, N, groups, _ = blocks.shape
            shape = (E, groups * _BLOCK, N)
            self.entries[matrix] = Entry(blocks.path, torch.bfloat16, shape, blocks.begin)
            self._packed[matrix] = blocks, scales

    def part(self, name: str, at: Box) -> Tensor:
        """See `HubFiles.part`; the part of a matrix in MXFP4 is widened to BF16."""
        if name not in self._packed:
            return super().part(name, at)
        experts, columns, rows = at
        first, last = columns.start // _BLOCK, -(-columns.stop // _BLOCK)
        groups = experts, rows, slice(first, last)
        blocks, scales = (entry.mapped(groups) for entry in self._packed[name])
        within = slice(columns.start - first * _BLOCK, columns.stop - first * _BLOCK, columns.step)
        return widened(blocks, scales)[..., within].mT

    def copy(self, name: str, at: Box, into: Tensor, *, dtype: torch.dtype, along: int = 0) -> None:
        """See `HubFiles.copy`; matrices in MXFP4 are cut along their stored rows, dimension 2."""
        super().copy(name, at, into, dtype=dtype, along=2 if name in self._packed else along)


def _fit(blocks: Entry, scales: Entry) -> bool:
    types = {blocks.dtype, scales.dtype}
    return (
        types == {torch.uint8}
        and len(blocks.shape) == 4
        and blocks.shape == (*scales.shape, _BLOCK // 2)
    )


def widened(blocks: Tensor, scales: Tensor) -> Tensor:
    """Values in MXFP4 widened to BF16, exactly; bitwise equal to transformers'.

    Args:
        blocks: (..., groups, 16) uint8, the lower four bits of each byte first.
        scales: (..., groups) uint8.

    Returns:
        (..., groups * 32) BF16.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], dtype=torch.bfloat16)
    found = torch.empty(*blocks.shape, 2, dtype=torch.bfloat16)
    for half, nibbles in enumerate((blocks & 15, blocks >> 4)):
        found[..., half] = table[nibbles.int()]
    found = found.flatten(-2)
    exponents = scales[..., None].int() - 127
    torch.ldexp(found, exponents, out=found)
    return found.flatten(-2)
