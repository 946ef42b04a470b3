"""Renaming of tensors from transformers' module names (`save_original_format=False`) to the names in the hub's files.

A layer's experts are two tensors there: `experts.gate_up_proj` (E, 2 F, D), gate before up, and `experts.down_proj` (E,
D, F). An expert's matrix is one range of bytes of them, so that no value is moved.
"""

import math
import re
from collections.abc import Mapping

from expertmesh.checkpoints.hub.family import HubFamily
from expertmesh.checkpoints.safetensors import Entry
from expertmesh.errors import CheckpointError

_FUSED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_scale_inv)?")
"""Names of all experts' matrices, and of their scales in FP8."""
_BRANCHES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def under_hub_names(entries: Mapping[str, Entry], family: HubFamily) -> dict[str, Entry]:
    """The entries of files under the names of a family's files."""
    found: dict[str, tuple[str, Entry]] = {}
    for name, entry in entries.items():
        match = None if family.experts else _FUSED.fullmatch(name)
        parts = {name: entry} if match is None else _of_each_expert(match, entry) or {name: entry}
        for one, part in parts.items():
            hub_name = family.hub_name(one)
            if hub_name in found:
                raise CheckpointError(
                    f"{entry.path.parent}: has both {found[hub_name][0]} and {name} for one tensor of the model; take "
                    "one of them away"
                )
            found[hub_name] = name, part
    return {hub_name: part for hub_name, (_, part) in found.items()}


def _of_each_expert(match: re.Match[str], entry: Entry) -> dict[str, Entry]:
    """Entries of the matrices of each expert; empty: the shape is of another layout."""
    module, kind, scale = match.groups()
    branches = _BRANCHES[kind]
    if len(entry.shape) != 3 or entry.shape[1] % len(branches) or isinstance(entry.dtype, str):
        return {}
    E, N, K = entry.shape
    shape = (N // len(branches), K)
    size = entry.dtype.itemsize * math.prod(shape)
    return {
        f"{module}.{e}.{branch}.weight{scale or ''}": Entry(
            entry.path, entry.dtype, shape, entry.begin + (e * len(branches) + i) * size
        )
        for e in range(E)
        for i, branch in enumerate(branches)
    }
