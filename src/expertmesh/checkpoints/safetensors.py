"""Safetensors files, single or sharded with an index: read through memory maps, and written tensor by tensor.

Sizes and shapes in headers are checked against the files before use. The library `safetensors` maps whole files as
private writable memory, which the kernel refuses for a file larger than RAM; here each tensor is mapped by itself.
"""

import json
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoints.source import check_range
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
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.bool: "BOOL",
}
"""Names of types in safetensors files."""
_ALIGNMENT = 8

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD_BYTES = 5 * 10**9
"""Largest size in bytes of a written file, unless one tensor is larger."""
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of weights that can be read."""
_BUFFER = re.compile(
    r"(^|\.)(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|position_ids|(self_attn|attn|attention)\.(masked_bias|bias))$"
)
"""Names of buffers that older programs saved and the model computes itself: angles, positions, masks."""
_ELEMENTS = 1 << 20
"""Number of elements that are compared, widened or rounded at a time."""


class Entry(NamedTuple):
    """Place, type and shape of a tensor in the files."""

    path: Path
    dtype: torch.dtype | str  # its type; a type that `DTYPE_NAMES` lacks by its name in the file
    shape: tuple[int, ...]
    begin: int  # its first byte in the file

    def mapped(self, at: tuple[slice, ...] = ()) -> Tensor:
        """The tensor, or a part of it, mapped from its file; not to be written to."""
        path, dtype, shape, begin = self
        assert isinstance(dtype, torch.dtype)
        num_bytes = dtype.itemsize * math.prod(shape)
        if not num_bytes:
            return torch.empty(shape, dtype=dtype)[at]
        # maps this tensor alone, so that its pages are freed with it; copy on write, since torch wants writable memory
        skipped = begin % mmap.ALLOCATIONGRANULARITY
        with path.open("rb") as file:
            held = mmap.mmap(file.fileno(), skipped + num_bytes, offset=begin - skipped, access=mmap.ACCESS_COPY)
        part = torch.frombuffer(held, dtype=torch.uint8, offset=skipped)
        if begin % dtype.itemsize:  # a header of an odd length
            odd = part.view(*shape, dtype.itemsize)[at]
            return odd.clone(memory_format=torch.contiguous_format).view(dtype).squeeze(-1)
        return part.view(dtype).view(shape)[at]


class HubFiles:
    """The tensors of a folder by name.

    Args:
        folder: folder with `model.safetensors`, or with shards and `model.safetensors.index.json`, whose word holds
            where a tensor is in several files.
        renamed: function from the entries by their names in the files to those by the names of the model.
    """

    def __init__(
        self,
        folder: Path,
        renamed: Callable[[dict[str, Entry]], dict[str, Entry]] = dict,
    ) -> None:
        self.folder = folder
        index, has_single = folder / INDEX, (folder / SINGLE).is_file()
        placed = _files_of_tensors(index) if index.is_file() else {}
        files = sorted(set(placed.values())) if index.is_file() else [SINGLE]
        if has_single and SINGLE not in files:
            raise ConfigError(
                f"{folder}: has both {SINGLE} and {INDEX}, which names other files; take away the one that is not the "
                "model's"
            )
        if not has_single and not index.is_file():
            raise ConfigError(f"{folder}: has neither {SINGLE} nor {INDEX}; give a folder as transformers saves one")
        found: dict[str, list[Entry]] = {}
        for file in files:
            entries, _ = read_header(folder / file, fix="restore it from the hub")
            for name, entry in entries.items():
                found.setdefault(name, []).append(entry)
        self.entries: dict[str, Entry] = renamed(
            {name: _chosen(name, entries, placed) for name, entries in found.items()}
        )

    def leave_out(self, beginnings: tuple[str, ...]) -> None:
        """Drop the tensors whose names have one of these prefixes, and the buffers of older programs."""
        self.entries = {
            name: entry
            for name, entry in self.entries.items()
            if not name.startswith(beginnings) and not _BUFFER.search(name)
        }

    def tie(self, name: str, again: str) -> None:
        """Merge the two names of a tied matrix into one, whichever of them the files have.

        Args:
            again: second name, which some programs write in addition, or alone.
        """
        other = self.entries.get(again)
        if other is None:
            return
        if name in self.entries and not self._are_equal(name, again):
            raise CheckpointError(
                f"{self.folder}: {again} differs from {name}, and config.json ties them; set tie_word_embeddings to "
                "false there if the model has both, or restore the files from the hub"
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
        """The type of most elements."""
        sizes = dict.fromkeys(READABLE, 0)
        for entry in self.entries.values():
            if isinstance(entry.dtype, torch.dtype) and entry.dtype in sizes:
                sizes[entry.dtype] += math.prod(entry.shape)
        return max(READABLE, key=lambda dtype: sizes[dtype])

    def tensor(self, name: str) -> Tensor:
        """A tensor mapped from its file; not to be written to."""
        return self.entries[name].mapped()

    def part(self, name: str, at: tuple[slice, ...]) -> Tensor:
        """A part of a tensor, mapped from its file; not to be written to."""
        return self.entries[name].mapped(at)

    def copy(self, name: str, at: tuple[slice, ...], into: Tensor, *, dtype: torch.dtype, along: int = 0) -> None:
        """Copy a part of a tensor, by blocks of few elements, so that little further memory is needed.

        Args:
            at: the part; slices have a start and a stop.
            into: the tensor to fill, of the shape of the part.
            dtype: type to which elements are rounded before they are converted to the type of `into`.
            along: the dimension that is cut into blocks.
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
            found = some.copy_(part) if into.dtype == dtype else part.to(dtype)
            check_range(part, found, name)
            if found is not some:
                some.copy_(found)


def sub_slice(at: slice, cut: slice) -> slice:
    """The part `cut` of a slice, as a slice of the same dimension."""
    step = at.step or 1
    return slice(at.start + cut.start * step, at.start + (cut.stop - 1) * step + 1, step)


def _files_of_tensors(index: Path) -> dict[str, str]:
    """Name of the file of each tensor in an index, all in the index's folder."""
    found = read_json(index, once=True).get("weight_map")
    placed: dict[str, Any] = found if isinstance(found, dict) else {"": None}
    for name in placed.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{index}: names {name!r} where a file beside it should stand; restore it from the hub"
            )
    return placed


def _chosen(name: str, entries: list[Entry], placed: Mapping[str, str]) -> Entry:
    """The entry of a tensor in the file that the index names."""
    of_file = {entry.path.name: entry for entry in entries}
    file = placed.get(name, entries[0].path.name)
    if file not in of_file or (len(entries) > 1 and name not in placed):
        where = f"{INDEX} names {file}" if name in placed else f"{INDEX} names none"
        raise CheckpointError(
            f"{entries[0].path.parent}: {name} is in {' and '.join(of_file)}, and {where} for it; restore the files "
            "from the hub"
        )
    return of_file[file]


QUANTIZATION = "quantization_config"
"""Key of config.json that marks quantised weights."""


def quant_method(values: Mapping[str, Any]) -> Any:
    """Quantisation method that a config.json names; None: it names none."""
    found = values.get(QUANTIZATION)
    return found.get("quant_method") if isinstance(found, Mapping) else None


def read_json(path: Path, *, once: bool = False) -> dict[str, Any]:
    """The object in a JSON file. `once`: whether a name that stands twice in an object is refused."""
    try:
        values = parse_json(path.read_bytes(), once=once)
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; restore it from the hub") from None
    except (ValueError, OSError):
        raise ConfigError(f"{path}: is unreadable; restore it from the hub") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: is no JSON object; restore it from the hub")
    return values


def check_tensors(files: HubFiles, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare names, shapes and types of all tensors with what the model needs."""
    where, found = files.folder, files.entries
    check_names(where, wanted=set(shapes), found=set(found), fix="restore the files from the hub")
    for name, shape in shapes.items():
        entry = found[name]
        if entry.shape != shape:
            turned = " (it is transposed)" if entry.shape == shape[::-1] else ""
            raise CheckpointError(
                f"{where}: {name} has shape {entry.shape} and must have {shape}{turned}; restore the files from the hub"
            )
        if entry.dtype not in READABLE:
            raise CheckpointError(
                f"{where}: {name} has dtype {entry.dtype}, and expertmesh reads float32, bfloat16, float16 and "
                "float64; use weights that are not quantised"
            )


def check_names(where: Path, *, wanted: set[str], found: set[str], fix: str) -> None:
    """Compare the names of all tensors with those that the model needs."""
    missing, extra = (_counted(sorted(names)) for names in (wanted - found, found - wanted))
    if missing and extra:
        raise CheckpointError(
            f"{where}: has no tensor {missing}, but {extra}, which the architecture of config.json does not have; use "
            "the config.json of these files, and files as transformers or expertmesh writes them"
        )
    if missing:
        raise CheckpointError(f"{where}: has no tensor {missing}; {fix}")
    if extra:
        raise CheckpointError(
            f"{where}: has a tensor {extra}, which the architecture of config.json does not have; use the config.json "
            "of these files"
        )


def _counted(names: list[str]) -> str:
    """The first of several names and how many more there are; "": there is none."""
    return " and ".join([*names[:1], *([f"{len(names) - 1} more"] if len(names) > 1 else [])])


def read_header(path: Path, *, fix: str) -> tuple[dict[str, Entry], dict[str, Any]]:
    """The entries of a safetensors file by name, and the texts of its metadata."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError
            values = parse_json(file.read(length), once=True)
        texts = values.pop("__metadata__", None)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: is missing; {fix}") from None
    except (ValueError, AttributeError, TypeError, struct.error, OSError):
        raise CheckpointError(f"{path}: is no safetensors file, or cut short; {fix}") from None
    start, found = 8 + length, {}
    for name, entry in values.items():
        try:
            begin, end = map(int, entry["data_offsets"])
            dtype = _DTYPES.get(entry["dtype"], entry["dtype"])
            shape = tuple(map(int, entry["shape"]))
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{path}: has no valid entry for {name}; {fix}") from None
        num_bytes = math.prod(shape) * getattr(dtype, "itemsize", 0)
        if start + end > size:
            raise CheckpointError(
                f"{path}: is cut short within {name}: {size:,} bytes of at least {start + end:,}; {fix}"
            )
        is_wrong = isinstance(dtype, torch.dtype) and end - begin != num_bytes
        if is_wrong or min(begin, end - begin, *shape) < 0:
            raise CheckpointError(f"{path}: {name} has {end - begin:,} bytes and its shape {num_bytes:,}; {fix}")
        found[name] = Entry(path, dtype, shape, start + begin)
    return found, texts if isinstance(texts, dict) else {}


class FileTensor(NamedTuple):
    """Name, type and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


def file_header(tensors: Iterable[FileTensor], texts: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, its length not included."""
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


def write_file(path: Path, tensors: Sequence[FileTensor], values: Iterator[Tensor], texts: Mapping[str, str]) -> None:
    """Write a safetensors file tensor by tensor, and wait until it is on disk.

    The file: eight bytes with the length of the header (little-endian), the header (JSON: dtype, shape and place of
    each tensor, and metadata), then the tensors.
    """
    header = file_header(tensors, texts)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for _ in tensors:
            file.write(tensor_bytes(next(values)))
        file.flush()
        os.fsync(file.fileno())


def write_shards(
    folder: Path,  # folder of the files
    tensors: Sequence[FileTensor],  # names, types and shapes of all tensors
    values: Iterator[Tensor],  # iterator over the tensors, in the same order; one is held at a time
    *,
    shard_bytes: int = SHARD_BYTES,  # largest size of a file, unless one tensor is larger
) -> int:
    """Write `model.safetensors`, or shards with their index, as `HubFiles` and transformers read them."""
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
