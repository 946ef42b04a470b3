"""Pieces of tensors in the files of a checkpoint, copied out of a memory map: nothing is unpickled, nothing held beside the target.

A piece is an archive as `torch.save` writes one tensor: a ZIP file whose entry `data/0` is the tensor's memory, not packed.
The index of the checkpoint says type and shape, so that the pickle beside it is never opened.
"""

import mmap
import struct
import zipfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from expertmesh.errors import CheckpointError

_BLOCK_BYTES = 1 << 15
_BLOCK_BYTES_GPU = 1 << 24
"""Each block is a copy of its own, for which the host waits."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MAGIC = b"PK\x03\x04"


class _Map(mmap.mmap):
    """A mapped file as `zipfile` wants it; before Python 3.13 there is no `seekable`."""

    def seekable(self) -> bool:
        return True


def copy_piece(
    target: Tensor,
    path: Path,
    where: tuple[slice, ...],
    *,
    offset: int,
    length: int,
    dtype: torch.dtype,
    sizes: torch.Size,
) -> None:
    """Copy a part of a piece, some rows at a time: data need not be aligned in the file, and tensors must be.

    The piece alone is mapped, so that its pages are nobody's afterwards.

    Args:
        target: gets the part.
        path: of the file.
        where: the part, a slice per dimension.
        offset: first byte of the archive.
        length: its bytes.
        dtype: type of the piece.
        sizes: shape of the piece, stored without gaps.

    Raises:
        CheckpointError: there is no such tensor.
    """
    num_bytes = dtype.itemsize * sizes.numel()
    try:
        before = offset % mmap.ALLOCATIONGRANULARITY  # of the file, with which a map must begin
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
    # the bytes of each number last, so that of a part of a row only these are read
    data = data.reshape(*sizes, dtype.itemsize)
    row_bytes = target[0].numel() * dtype.itemsize
    rows = max(1, (_BLOCK_BYTES if target.is_cpu else _BLOCK_BYTES_GPU) // row_bytes)
    first, stop = where[0].start, where[0].stop
    for row in range(first, stop, rows):
        end = min(row + rows, stop)
        block = torch.from_numpy(np.array(data[row:end, *where[1:]], order="C"))
        target[row - first : end - first].copy_(block.view(dtype).squeeze(-1))


def _start_of_data(mapped: _Map, num_bytes: int) -> int:
    """Where the memory of the one tensor begins in an archive, before which there may be something else.

    Raises:
        ValueError: it has none of that length.
        zipfile.BadZipFile: it is no archive; RuntimeError (NotImplementedError with it): of a kind that is not read here;
            EOFError: it ends too early.
    """
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
    return start
