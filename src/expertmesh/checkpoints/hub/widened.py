"""Which files have rounded weights that are widened when they are read, and who reads them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expertmesh.checkpoints.hub.fp8 import Fp8Files
from expertmesh.checkpoints.hub.mxfp4 import Mxfp4Files
from expertmesh.checkpoints.safetensors import HubFiles, quant_method


def is_widened(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says of its weights that they are rounded so; other ways stay as they are in memory, or are not read."""
    return quant_method(values) in ("fp8", "mxfp4")


def hub_files(folder: Path, values: Mapping[str, Any]) -> HubFiles:
    """The tensors of a folder by name, as plain numbers.

    Args:
        folder: see `HubFiles`.
        values: of its config.json.

    Raises:
        ConfigError: see `HubFiles` and `Fp8Files`.
        CheckpointError: see `HubFiles` and `Mxfp4Files`.
    """
    method = quant_method(values)
    if method == "fp8":
        return Fp8Files(folder, values)
    return Mxfp4Files(folder) if method == "mxfp4" else HubFiles(folder)
