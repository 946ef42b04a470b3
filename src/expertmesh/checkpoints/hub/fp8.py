"""Files with FP8 weights and a scale per block, as of DeepSeek-V3, Kimi-K2 and Qwen3: widened a part at a time.

A matrix NAME (N, K) is NAME in float8_e4m3fn and NAME_scale_inv (N / rows, K / columns), rounded up;
`weight_block_size` of config.json gives rows and columns of a block. A weight is its FP8 value times the scale of its
block.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box, whole_box
from expertmesh.checkpoints.safetensors import QUANTIZATION, READABLE, Entry, HubFiles
from expertmesh.errors import ConfigError

_BLOCK_SIZE = (128, 128)
"""Block size where config.json gives none, as in transformers."""
_SCALES = (*READABLE, torch.float8_e8m0fnu)
"""Types of scales."""


class Fp8Files(HubFiles):
    """The tensors of a folder by name, an FP8 matrix and its scales as one matrix."""

    def __init__(
        self,
        folder: Path,  # see `HubFiles`
        values: Mapping[str, Any],  # the values of its config.json, whose `quant_method` is fp8
        renamed: Callable[[dict[str, Entry]], dict[str, Entry]] = dict,  # see `HubFiles`
    ) -> None:
        super().__init__(folder, renamed)
        self._block_size = _block_size(values, folder)
        self._scaled: dict[Entry, tuple[Entry, Entry]] = {}
        for name, matrix in list(self.entries.items()):
            if matrix.dtype != torch.float8_e4m3fn:
                continue
            scales = self.entries.pop(f"{name}_scale_inv", None)
            if scales is None:
                other = next((n for n in self.entries if n.startswith(f"{name}_")), None)
                fix = f"of {other} nothing is read; give scales of blocks, or the model in BF16"
                raise ConfigError(
                    f"{folder}: {name} is in FP8 and has no {name}_scale_inv beside it; "
                    f"{fix if other else 'restore the files from the hub'}"
                )
            if scales.dtype not in _SCALES:
                kind = str(scales.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"{folder}: {name}_scale_inv is of type {kind}, and expertmesh reads scales in float32, bfloat16, "
                    "float16, float64 and powers of two (F8_E8M0); give the model with such scales, or in BF16"
                )
            sizes = zip(matrix.shape, self._block_size, strict=False)
            fitting = tuple(-(-size // block) for size, block in sizes)
            if len(matrix.shape) != 2 or scales.shape != fitting:
                raise ConfigError(
                    f"{folder}: {name}_scale_inv has shape {scales.shape}, and {name} {matrix.shape} in blocks of "
                    f"{self._block_size} needs {fitting}; use the config.json of these files"
                )
            self.entries[name] = matrix._replace(dtype=torch.bfloat16)
            self._scaled[self.entries[name]] = matrix, scales

    @property
    def has_square_blocks(self) -> bool:
        """Whether blocks are as `ops/experts/quantized_formats.py` has them."""
        return self._block_size == _BLOCK_SIZE

    def stored(self, name: str) -> tuple[Tensor, Tensor] | None:
        """A matrix in FP8 and its scales as they are in the files; None: the matrix is in another type."""
        pair = self._scaled.get(self.entries[name])
        return None if pair is None else (pair[0].mapped(), pair[1].mapped())

    def tensor(self, name: str) -> Tensor:
        """See `HubFiles.tensor`; a matrix in FP8 is widened whole."""
        return self.part(name, whole_box(self.entries[name].shape))

    def part(self, name: str, at: Box) -> Tensor:
        """See `HubFiles.part`; the part of a matrix in FP8 is widened to FP32."""
        entry = self.entries[name]
        if entry not in self._scaled:
            return entry.mapped(at)
        matrix, scales = (one.mapped() for one in self._scaled[entry])
        return widened(matrix, scales, self._block_size, at)


def _block_size(values: Mapping[str, Any], folder: Path) -> tuple[int, int]:
    found = values[QUANTIZATION].get("weight_block_size", _BLOCK_SIZE)
    is_pair = isinstance(found, list | tuple) and len(found) == 2
    if not is_pair or not all(type(size) is int and size > 0 for size in found):
        raise ConfigError(
            f"{folder}: weight_block_size={found!r} in quantization_config; expertmesh reads FP8 in blocks of rows and "
            "columns, as [128, 128]; give the model so, or in BF16"
        )
    return found[0], found[1]


def widened(matrix: Tensor, scales: Tensor, block_size: tuple[int, int], at: Box) -> Tensor:
    """A part of an FP8 matrix widened to FP32: each value times the scale of its block.

    Args:
        matrix: (N, K) float8_e4m3fn.
        scales: (N / rows, K / columns) rounded up, of a floating-point type.
        block_size: rows and columns of a block; the last ones may be cut.
        at: box of the part, which need not begin or end with a block.

    Returns:
        FP32, of the shape of the part.
    """
    rows, columns = (
        torch.arange(size)[part] // block for size, part, block in zip(matrix.shape, at, block_size, strict=True)
    )
    return matrix[at].float().mul_(scales.float()[rows[:, None], columns])
