"""Files of `torch.save` that others wrote."""

import pickle
import re
from pathlib import Path
from typing import Any

import torch

from expertmesh.errors import ConfigError


def load_torch_file(path: str | Path) -> dict[str, Any]:
    """Contents of a file of tensors and plain values, on the CPU; no code of the file runs."""
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = re.split(r"[.\n]", str(error))[0]
        raise ConfigError(
            f"{path}: holds other things than tensors and plain values ({reason}); save it again without them"
        ) from error
    return found
