"""Weights whose experts are rounded to another format while they are read, one expert at a time."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.checkpoints.box import Box, whole_box
from expertmesh.checkpoints.compressed_tensors import is_expert
from expertmesh.checkpoints.source import Stored, TensorSource
from expertmesh.errors import ConfigError
from expertmesh.ops.experts.quantized_formats import QUANTIZED
from expertmesh.ops.experts.weights import Kept

_SCALE = "_scale"


@dataclass(frozen=True)
class ExpertFormat:
    """Format of the matrices of a model's routed experts."""

    format: str  # name of the format in `QUANTIZED`
    dtype: torch.dtype  # dtype of the products, and of scales whose type the format leaves open
    group_size: int = 64  # input columns per scale, where the format leaves it open

    @property
    def text(self) -> str:
        """The format in words, for `of`."""
        return f"{self.format} {self.group_size} {str(self.dtype).removeprefix('torch.')}"

    @classmethod
    def of(cls, text: str) -> "ExpertFormat":
        """The format of a `text`."""
        form, group_size, dtype = text.split()
        return cls(form, getattr(torch, dtype), int(group_size))


class RoundedExperts:
    """Tensors of another source with experts in a quantised format; a `TensorSource`."""

    def __init__(self, source: TensorSource, scheme: ExpertFormat) -> None:
        self._source, self.scheme, self.products_dtype = source, scheme, scheme.dtype
        self._form = QUANTIZED[scheme.format]
        # by matrix and experts, made with the codes and kept until they are read
        self._scales: dict[tuple[str, int, int], Tensor] = {}
        unit = self._form.columns(scheme.group_size)
        for name, (shape, _) in source.tensors.items():
            if is_expert(name) and shape[-1] % unit:
                raise ConfigError(
                    f"{source.path}: {name} has {shape[-1]} columns, and {scheme.format} needs groups of {unit}; use "
                    "int8"
                )

    @property
    def path(self) -> Path:
        """The folder."""
        return self._source.path

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """See `TensorSource`."""
        found: dict[str, Stored] = {}
        for name, stored in self._source.tensors.items():
            if not is_expert(name):
                found[name] = stored
                continue
            found |= {name + end: Stored(*one) for end, one in self._kept(stored.shape).items()}
        return found

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """See `TensorSource.read`; an expert is read whole, and rounded where `into` is."""
        matrix = name.removesuffix(_SCALE)
        if not is_expert(matrix) or name not in self.tensors:
            self._source.read(name, box, into)
            return
        wanted, key = name.removeprefix(matrix), (matrix, box[0].start, box[0].stop)
        if wanted and (ready := self._scales.pop(key, None)) is not None:
            into.copy_(ready[:, *box[1:]])
            return
        scales = []
        for place, expert in enumerate(range(box[0].start, box[0].stop)):
            made = self._made(matrix, expert, into.device)
            into[place].copy_(made[wanted][box[1:]])
            scales.append(made[_SCALE].to(self.tensors[matrix + _SCALE].dtype))
        if not wanted:
            self._scales[key] = torch.stack(scales)

    def _made(self, matrix: str, expert: int, device: torch.device) -> dict[str, Tensor]:
        """Tensors of one expert, by the endings of their names."""
        (_, *one), dtype = self._source.tensors[matrix]
        wide = torch.empty(1, *one, dtype=dtype, device=device)
        self._source.read(matrix, (slice(expert, expert + 1), *whole_box(one)), wide)
        if not wide.isfinite().all():
            raise ConfigError(f"{self.path}: {matrix} has numbers that are not finite; mend the model first")
        return self._form.pack(wide[0], self.scheme.dtype, self.scheme.group_size)

    def _kept(self, shape: tuple[int, ...]) -> dict[str, Kept]:
        return self._form.kept(shape, self.scheme.dtype, self.scheme.group_size)


class WidenedExperts:
    """Tensors of a source with quantised experts, these widened, one at a time; a `TensorSource`."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._form = QUANTIZED[source.scheme.format]

    @property
    def path(self) -> Path:
        """The folder."""
        found: Path = self._source.path
        return found

    @cached_property
    def tensors(self) -> Mapping[str, Stored]:
        """See `TensorSource`."""
        found: dict[str, Stored] = {}
        for name, stored in self._source.tensors.items():
            if is_expert(name):
                shape = self._form.wide_shape(stored.shape)
                found[name] = Stored(shape, self._source.products_dtype)
            elif not is_expert(name.removesuffix(_SCALE)):
                found[name] = stored
        return found

    def read(self, name: str, box: Box, into: Tensor) -> None:
        """See `TensorSource.read`; an expert is widened whole."""
        if not is_expert(name):
            self._source.read(name, box, into)
            return
        for place, expert in enumerate(range(box[0].start, box[0].stop)):
            codes, scales = (self._of(f"{name}{end}", expert) for end in ("", _SCALE))
            wide = self._form.wide(codes, scales, self._source.products_dtype)
            into[place].copy_(wide[box[1:]])

    def _of(self, name: str, expert: int) -> Tensor:
        """Part of a tensor that is of one expert."""
        (_, *one), dtype = self._source.tensors[name]
        found = torch.empty(1, *one, dtype=dtype)
        self._source.read(name, (slice(expert, expert + 1), *whole_box(one)), found)
        return found[0]
