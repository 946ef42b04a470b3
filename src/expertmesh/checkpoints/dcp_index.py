"""The index of a checkpoint, a pickle, read by a restricted unpickler because folders may come from strangers.

`torch.distributed.checkpoint` unpickles its `.metadata` with no restriction, so that a folder could run any command.
Here only the few classes of an index may occur, pieces must lie in the folder itself, and transformed ones are refused.
Of the tensors' own files only the tensors' memory is read (`dcp_files.py`).
"""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata

from expertmesh.errors import CheckpointError

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.storage", "WriteResult"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("collections", "OrderedDict"),
    *(
        (_METADATA, name)
        for name in (
            "_MEM_FORMAT_ENCODING",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
        )
    ),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in _CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of an index")


def read_plain(path: Path) -> Any:
    """The object in a pickle of an index, or of a rank's record."""
    data = path.read_bytes()
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # unpickling a damaged file may raise anything
        raise CheckpointError(f"{path}: is unreadable ({error}); choose another checkpoint") from error


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: file and offset of each piece of its tensors."""
    path = folder / ".metadata"
    found = read_plain(path)
    places = list(found.storage_data.values()) if isinstance(found, Metadata) else [None]
    for place in places:
        if (
            not isinstance(place, _StorageInfo)
            or Path(place.relative_path).name != place.relative_path
            or place.transform_descriptors is not None
        ):
            raise CheckpointError(
                f"{path}: is unreadable (it is no index of files of this folder); choose another checkpoint"
            )
    result: Metadata = found
    return result
