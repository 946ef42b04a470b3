"""Readers of hub files, by quantisation: FP8 and MXFP4 weights are widened when they are read."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from expertmesh.checkpoints.hub.find_family import hub_family
from expertmesh.checkpoints.hub.fp8 import Fp8Files
from expertmesh.checkpoints.hub.module_names import under_hub_names
from expertmesh.checkpoints.hub.mxfp4 import Mxfp4Files
from expertmesh.checkpoints.safetensors import HubFiles, quant_method


def is_widened(values: Mapping[str, Any]) -> bool:
    """Whether a config.json has a quantisation that is widened on reading; others stay quantised in memory, or are
    refused."""
    return quant_method(values) in ("fp8", "mxfp4")


def hub_files(folder: Path, values: Mapping[str, Any]) -> HubFiles:
    """The tensors of a folder by name, FP8 and MXFP4 widened."""
    method = quant_method(values)
    renamed = partial(under_hub_names, family=hub_family(values))
    if method == "fp8":
        return Fp8Files(folder, values, renamed)
    return Mxfp4Files(folder) if method == "mxfp4" else HubFiles(folder, renamed)
