"""Pieces of tensors in the files of a checkpoint, copied out of a memory map block by block, without unpickling.

A piece is an archive as `torch.save` writes a tensor: a ZIP file whose entry `data/0` is the tensor's memory,
uncompressed. Type and shape come from the index of the checkpoint, so that the pickle in the archive is never opened.
"""

import mmap
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertmesh.checkpoints.source import check_range
from expertmesh.errors import CheckpointError

_BLOCK_BYTES = 1 << 15
_BLOCK_BYTES_GPU = 1 << 24
"""Bytes of a block for a GPU; the host waits for the copy of each."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\x03\x04"


class _Map(mmap.mmap):
    """A mapped file for `zipfile`, which calls `seekable`; `mmap` has it from Python 3.13 on."""

    def seekable(self) -> bool:
        return True


def copy_piece(
    target: Tensor,  # the tensor to fill
    path: Path,
    where: tuple[slice, ...],  # the part, a slice per dimension
    *,
    offset: int,  # first byte of the archive
    length: int,  # bytes of the archive
    dtype: torch.dtype,
    sizes: torch.Size,  # shape of the piece, stored without gaps
) -> None:
    """Copy a part of a piece, some rows at a time: data may be unaligned in the file, and tensors may not.

    Only the piece is mapped, so that its pages are free afterwards.
    """
    num_bytes = dtype.itemsize * sizes.numel()
    try:
        before = offset % mmap.ALLOCATIONGRANULARITY  # a map must begin at a multiple
        with path.open("rb") as file:
            whole = before + length
            mapped = _Map(file.fileno(), whole, offset=offset - before, access=mmap.ACCESS_READ)
        start = _start_of_data(mapped, num_bytes)
    except (
        zipfile.BadZipFile,
        RuntimeError,
        EOFError,
        ValueError,
        OverflowError,
        struct.error,
    ) as error:
        raise CheckpointError(
            f"{path.parent}: its .distcp files hold no tensors of this checkpoint ({error}); choose another checkpoint"
        ) from None
    data = np.frombuffer(mapped, np.uint8, num_bytes, start)
    if not sizes:
        target.copy_(torch.from_numpy(data.copy()).view(dtype)[0])
        return
    if not target.numel():
        return
    # bytes of a number as the last dimension, so that only the part's columns are read
    data = data.reshape(*sizes, dtype.itemsize)
    row_bytes = target[0].numel() * dtype.itemsize
    rows = max(1, (_BLOCK_BYTES if target.is_cpu else _BLOCK_BYTES_GPU) // row_bytes)
    first, stop = where[0].start, where[0].stop
    for row in range(first, stop, rows):
        end = min(row + rows, stop)
        block = torch.from_numpy(np.array(data[row:end, *where[1:]], order="C")).view(dtype).squeeze(-1)
        check_range(block, target[row - first : end - first].copy_(block), f"a tensor of {path.parent}")


def _start_of_data(mapped: _Map, num_bytes: int) -> int:
    """Offset of the only tensor's memory in a mapped archive, which may begin with other bytes."""
    with zipfile.ZipFile(mapped) as entries:  # type: ignore[call-overload]
        found = [e for e in entries.infolist() if e.filename.endswith("/data/0")]
        order = [e for e in entries.infolist() if e.filename.endswith("/byteorder")]
        if any(e.compress_type != zipfile.ZIP_STORED for e in order):
            raise ValueError("an archive is packed")
        if any(entries.read(e) != b"little" for e in order):
            raise ValueError("their bytes are in another order")
    if len(found) != 1 or found[0].compress_type != zipfile.ZIP_STORED:
        raise ValueError("an archive has no single tensor")
    if found[0].file_size != num_bytes:
        raise ValueError(f"a tensor has {found[0].file_size} bytes, not {num_bytes}")
    at = found[0].header_offset
    magic, name_length, extra_length = _LOCAL_HEADER.unpack_from(mapped, at)
    start = at + _LOCAL_HEADER.size + name_length + extra_length
    if magic != _MAGIC or start + num_bytes > len(mapped):
        raise ValueError("an archive is cut short")
    result: int = start
    return result
