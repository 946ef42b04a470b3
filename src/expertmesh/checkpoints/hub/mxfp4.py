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
from expertmesh.ops.quantized.mxfp4 import BLOCK, widened


class Mxfp4Files(HubFiles):
    """The tensors of a folder by name, blocks and scales as one BF16 matrix."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._packed: dict[str, tuple[Entry, Entry]] = {}
        for name in [n for n in self.entries if n.endswith("_blocks")]:
            matrix = name.removesuffix("_blocks")
            scales = self.entries.pop(f"{matrix}_scales", None)
            blocks = self.entries.pop(name)
            if scales is None or not _fit(blocks, scales):
                raise CheckpointError(
                    f"{folder}: {name} has no {matrix}_scales of uint8, one per 32 numbers, beside it; restore the "
                    "files from the hub"
                )
            if matrix in self.entries:
                raise CheckpointError(
                    f"{folder}: has both {matrix} and {name} for one tensor of the model; take one of them away"
                )
            E, N, groups, _ = blocks.shape
            shape = (E, groups * BLOCK, N)
            self.entries[matrix] = Entry(blocks.path, torch.bfloat16, shape, blocks.begin)
            self._packed[matrix] = blocks, scales

    def part(self, name: str, at: Box) -> Tensor:
        """See `HubFiles.part`; the part of a matrix in MXFP4 is widened to BF16."""
        if name not in self._packed:
            return super().part(name, at)
        experts, columns, rows = at
        first, last = columns.start // BLOCK, -(-columns.stop // BLOCK)
        groups = experts, rows, slice(first, last)
        blocks, scales = (entry.mapped(groups) for entry in self._packed[name])
        within = slice(columns.start - first * BLOCK, columns.stop - first * BLOCK, columns.step)
        return widened(blocks, scales)[..., within].mT

    def copy(self, name: str, at: Box, into: Tensor, *, dtype: torch.dtype, along: int = 0) -> None:
        """See `HubFiles.copy`; matrices in MXFP4 are cut along their stored rows, dimension 2."""
        super().copy(name, at, into, dtype=dtype, along=2 if name in self._packed else along)


def _fit(blocks: Entry, scales: Entry) -> bool:
    types = {blocks.dtype, scales.dtype}
    return types == {torch.uint8} and len(blocks.shape) == 4 and blocks.shape == (*scales.shape, BLOCK // 2)
