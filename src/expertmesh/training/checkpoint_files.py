"""Pieces of tensors in the files of a checkpoint, copied out of a memory map: nothing is unpickled, nothing held beside the target.

A piece is an archive as `torch.save` writes one tensor: a ZIP file whose entry `data/0` is the tensor's memory, not packed.
The index of the checkpoint says type and shape, so that the pickle beside it is never opened.
"""

import io
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
        archive = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(length,))
        start = _start_of_data(archive, num_bytes)
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
    data = archive[start : start + num_bytes]
    if not sizes:
        target.copy_(torch.from_numpy(data.copy()).view(dtype)[0])
        return
    if not target.numel():
        return
    row_bytes = num_bytes // sizes[0]
    rows = max(1, (_BLOCK_BYTES if target.is_cpu else _BLOCK_BYTES_GPU) // row_bytes)
    first, stop = where[0].start, where[0].stop
    for row in range(first, stop, rows):
        end = min(row + rows, stop)
        block = torch.from_numpy(np.array(data[row * row_bytes : end * row_bytes]))
        block = block.view(dtype).view(end - row, *sizes[1:])
        target[row - first : end - first].copy_(block[:, *where[1:]])


def _start_of_data(archive: np.ndarray, num_bytes: int) -> int:
    """Where the memory of the one tensor in an archive begins.

    Raises:
        ValueError: it has none of that length.
        zipfile.BadZipFile: it is no archive; RuntimeError (NotImplementedError with it): of a kind that is not read here;
            EOFError: it ends too early.
    """
    with zipfile.ZipFile(io.BufferedReader(_View(archive))) as entries:
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
    header = archive[at : at + _LOCAL_HEADER.size].tobytes()
    magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    start = at + _LOCAL_HEADER.size + name_length + extra_length
    if magic != _MAGIC or start + num_bytes > len(archive):
        raise ValueError("an archive is cut short")
    return int(start)


class _View(io.RawIOBase):
    """Mapped bytes as a file."""

    def __init__(self, data: np.ndarray) -> None:
        super().__init__()
        self._data, self._at = data, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        if base + offset < 0:
            raise ValueError("an archive is cut short")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        part = self._data[self._at : self._at + len(buffer)]
        memoryview(buffer)[: len(part)] = part.tobytes()
        self._at += len(part)
        return len(part)
