"""Safetensors files, one of them, or shards with an index: read through memory maps, and written tensor by tensor.

Nothing is trusted that was not compared.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from expertmesh.config.base import parse_json
from expertmesh.data.tensors import tensor_bytes
from expertmesh.errors import CheckpointError, ConfigError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bool: "BOOL",
}
"""What safetensors files call types."""
_ALIGNMENT = 8

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Most bytes of a file that is written, unless one tensor is larger."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of weights that are read."""
_BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|position_ids|(self_attn|attn|attention)\.(masked_bias|bias))$"
)
"""Names of what older programs saved beside the weights and the model computes itself: angles, positions, masks."""
_ELEMENTS = 1 << 18
"""Numbers that are compared, or widened or rounded on the way, at a time."""


class Entry(NamedTuple):
    """One tensor of the files.

    Attributes:
        path: of its file.
        dtype: its type, or the file's name of a type that torch's common ones lack.
        shape: its shape.
        begin: its first byte in the file.
    """

    path: Path
    dtype: torch.dtype | str
    shape: tuple[int, ...]
    begin: int


class HubFiles:
    """The tensors of a folder by name.

    Args:
        folder: has `model.safetensors`, or shards and `model.safetensors.index.json`.

    Raises:
        ConfigError: it has neither.
        CheckpointError: a file is missing, or ends before one of its tensors does, or contradicts itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        index = folder / INDEX
        if index.is_file():
            names = _names_of_files(index)
        elif (folder / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise ConfigError(
                f"{folder}: has neither {SINGLE} nor {INDEX}; give a folder as transformers saves one"
            )
        for name in names:
            self.entries |= _header(folder / name)

    def leave_out(self, beginnings: tuple[str, ...]) -> None:
        """Forget the tensors whose names begin so, and the buffers of older programs."""
        self.entries = {
            name: entry
            for name, entry in self.entries.items()
            if not name.startswith(beginnings) and not _BUFFER.search(name)
        }

    def tie(self, name: str, again: str) -> None:
        """Of a matrix that a model uses twice: take it under its one name, whichever of the two the files have.

        Args:
            name: under which the model has it.
            again: under which some programs write it, too, or alone.

        Raises:
            CheckpointError: both are there and differ.
        """
        other = self.entries.get(again)
        if other is None:
            return
        if name in self.entries and not self._are_equal(name, again):
            raise CheckpointError(
                f"{self.folder}: {again} differs from {name}, and config.json ties them; set tie_word_embeddings to false there if "
                "the model has both, or restore the files from the hub"
            )
        self.entries.setdefault(name, other)
        del self.entries[again]

    def _are_equal(self, name: str, again: str) -> bool:
        pair = self.entries[name], self.entries[again]
        if pair[0].shape != pair[1].shape or any(e.dtype not in READABLE for e in pair):
            return False
        one, two = self.tensor(name), self.tensor(again)
        rows = max(_ELEMENTS * len(one) // max(one.numel(), 1), 1)
        blocks = zip(one.split(rows), two.split(rows), strict=True)
        return all(torch.equal(a.double(), b.double()) for a, b in blocks)

    def usual_dtype(self) -> torch.dtype:
        """The type of most numbers."""
        sizes = dict.fromkeys(READABLE, 0)
        for entry in self.entries.values():
            if isinstance(entry.dtype, torch.dtype) and entry.dtype in sizes:
                sizes[entry.dtype] += math.prod(entry.shape)
        return max(READABLE, key=lambda dtype: sizes[dtype])

    def tensor(self, name: str) -> Tensor:
        """A tensor whose memory is the file; not to be written to."""
        return self.mapped(self.entries[name])

    def part(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """A part of a tensor; not to be written to."""
        return self.mapped(self.entries[name], at)

    def copy(
        self, name: str, at: tuple[slice, ...], into: Tensor, *, dtype: torch.dtype, along: int = 0
    ) -> None:
        """Copy a part of a tensor; needs memory for few of its numbers beside `into`.

        Args:
            name: of the tensor.
            at: the part; slices have a start and a stop.
            into: gets it; of the shape of the part.
            dtype: to which numbers are rounded before they have the type of `into`.
            along: the dimension along which it is cut into what is there at a time.
        """
        sizes = into.shape
        rows = max(_ELEMENTS * sizes[along] // max(into.numel(), 1), 1) if sizes else 1
        for start in range(0, sizes[along], rows) if sizes else (0,):
            some, there = into, at
            if sizes:
                count = min(rows, sizes[along] - start)
                some = into.narrow(along, start, count)
                cut = sub_slice(at[along], slice(start, start + count))
                there = (*at[:along], cut, *at[along + 1 :])
            part = self.part(name, there)
            some.copy_(part if into.dtype == dtype else part.to(dtype))

    @staticmethod
    def mapped(entry: Entry, at: tuple[slice, ...] = ()) -> Tensor:
        """The tensor of an entry, or a part of it, whose memory is the file."""
        path, dtype, shape, begin = entry
        assert isinstance(dtype, torch.dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        # of the tensor alone, so that its pages are nobody's when it is gone; copy on write: torch wants memory that it might write to
        part = torch.from_numpy(
            np.memmap(path, dtype=np.uint8, mode="c", offset=begin, shape=(num_bytes,))
        )
        if begin % dtype.itemsize:  # a header of an odd length
            odd = part.view(*shape, dtype.itemsize)[at]
            return odd.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)
        return part.view(dtype).view(shape)[at]


def sub_slice(at: slice, cut: slice) -> slice:
    """Where a part of a slice lies.

    Args:
        at: has a start and a stop.
        cut: counted from the first of it; not empty.
    """
    step = at.step or 1
    return slice(at.start + cut.start * step, at.start + (cut.stop - 1) * step + 1, step)


def _names_of_files(index: Path) -> list[str]:
    """The files that an index names, which lie beside it."""
    found = read_json(index).get("weight_map")
    names: list[Any] = list(found.values()) if isinstance(found, dict) else [None]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index}: names {name!r} where a file beside it should stand; restore it from the hub"
            )
    return sorted(set(names))


QUANTIZATION = "quantization_config"
"""Key of a config.json whose weights are quantised."""


def quant_method(values: Mapping[str, Any]) -> Any:
    """How a config.json says that its weights are quantised; None: not, or it does not say."""
    found = values.get(QUANTIZATION)
    return found.get("quant_method") if isinstance(found, Mapping) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that is an object.

    Raises:
        ConfigError: it is missing or unreadable.
    """
    try:
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; restore it from the hub") from None
    except (ValueError, OSError):
        raise ConfigError(f"{path}: is unreadable; restore it from the hub") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is no JSON object; restore it from the hub")
    return values


def check_tensors(files: HubFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names, shapes and types of all tensors with what the model needs.

    Args:
        files: the folder.
        shapes: what the model needs, by the hub's names.

    Raises:
        CheckpointError: a tensor is missing, extra, transposed, of another shape, or of a type that holds no plain numbers; names it.
    """
    where, found = files.folder, files.entries
    if missing := sorted(set(shapes) - set(found)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{where}: has no tensor {missing[0]}{more}; restore the files from the hub"
        )
    if extra := sorted(set(found) - set(shapes)):
        raise CheckpointError(
            f"{where}: has a tensor {extra[0]} that config.json says nothing of; use the config.json of these files"
        )
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            turned = " (it is transposed)" if entry.shape == shape[::-1] else ""
            raise CheckpointError(
                f"{where}: {name} has shape {entry.shape} and must have {shape}{turned}; restore the files from the hub"
            )
        if entry.dtype not in READABLE:
            raise CheckpointError(
                f"{where}: {name} has dtype {entry.dtype}, and expertmesh reads float32, bfloat16, float16 and float64; use weights "
                "that are not quantised"
            )


def _header(path: Path) -> dict[str, Entry]:
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError
            values = parse_json(file.read(length))
        return dict(_entries(values, path, start=8 + length, size=size))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: is missing, and the index names it; restore it from the hub"
        ) from None
    except (ValueError, AttributeError, struct.error, OSError):
        raise CheckpointError(
            f"{path}: is no safetensors file, or cut short; restore it from the hub"
        ) from None


def _entries(values: Any, path: Path, *, start: int, size: int) -> Iterator[tuple[str, Entry]]:
    """What a header says of its tensors, whose bytes begin at `start`.

    Raises:
        CheckpointError: the file ends before one of them does, or the numbers of one do not fit together.
    """
    for name, entry in values.items():
        if name == "__metadata__":
            continue
        try:
            begin, end = map(int, entry["data_offsets"])
            dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
            shape = tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(
                f"{path}: says nothing usable of {name}; restore it from the hub"
            ) from None
        num_bytes = math.prod(shape) * getattr(dtype, "itemsize", 0)
        if start + end > size:
            raise CheckpointError(
                f"{path}: is cut short within {name}: {size:,} bytes of at least {start + end:,}; restore it from the hub"
            )
        is_wrong = isinstance(dtype, torch.dtype) and end - begin != num_bytes
        if is_wrong or min(begin, end - begin, *shape) < 0:
            raise CheckpointError(
                f"{path}: {name} has {end - begin:,} bytes and its shape {num_bytes:,}; restore it from the hub"
            )
        yield name, Entry(path, dtype, shape, start + begin)


class FileTensor(NamedTuple):
    """A tensor as a file is to have it."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.dtype.itemsize * math.prod(self.shape)


def file_header(tensors: Iterable[FileTensor], texts: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, its length not included.

    Args:
        tensors: in the order of their bytes.
        texts: plain texts that go with them.
    """
    entries: dict[str, Any] = {"__metadata__": dict(texts)}
    end = 0
    for one in tensors:
        begin, end = end, end + one.num_bytes
        entries[one.name] = {
            "dtype": DTYPE_NAMES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def write_file(
    path: Path, tensors: Sequence[FileTensor], values: Iterator[Tensor], texts: Mapping[str, str]
) -> None:
    """Write a safetensors file tensor by tensor, and wait until the disk has it.

    The file: eight bytes with the length of the header (little-endian), the header (JSON: dtype, shape and place of each tensor, and
    plain texts), then the tensors.

    Args:
        path: of the file.
        tensors: what it is to have.
        values: of these tensors, in their order; as many are taken as there are.
        texts: plain texts that go with them.
    """
    header = file_header(tensors, texts)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in tensors:
            file.write(tensor_bytes(next(values)))
        file.flush()
        os.fsync(file.fileno())


def write_shards(
    folder: Path,
    tensors: Sequence[FileTensor],
    values: Iterator[Tensor],
    *,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Write `model.safetensors`, or files of a size and their index, as `HubFiles` and transformers read them.

    Args:
        folder: where to.
        tensors: all of them.
        values: theirs, in their order; one is held at a time.
        shard_bytes: most bytes of a file, unless one tensor is larger.

    Returns:
        Bytes of all tensors.
    """
    shards: list[list[FileTensor]] = [[]]
    for one in tensors:
        if shards[-1] and sum(t.num_bytes for t in shards[-1]) + one.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(one)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for name, shard in zip(names, shards, strict=True):
        write_file(folder / name, shard, values, {"format": "pt"})
    total = sum(t.num_bytes for t in tensors)
    if len(shards) > 1:
        placed = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return total
