"""Opening of quantised folders: their weights, and modules for quantised experts in a model."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from expertmesh.checkpoints.compressed_tensors import (
    QuantizedModel,
    own_pieces,
    quantization_of,
    scheme_of,
)
from expertmesh.checkpoints.hub.find_family import hub_family
from expertmesh.checkpoints.hub.layout import pieces
from expertmesh.checkpoints.rounded import RoundedExperts
from expertmesh.checkpoints.source import Stored
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops.experts.weights import TENSORS

PackedExperts = QuantizedModel | RoundedExperts
"""Sources whose experts are in a quantised format."""
REPORT = "quantization.json"
"""File of the folder with the quantisation's settings and sizes."""


def open_quantized(folder: Path, config: Any) -> QuantizedModel:
    """The weights of a quantised folder, with the configuration of its run, of family gpt."""
    values = quantization_of(folder)
    assert values is not None
    scheme = scheme_of(values, folder)
    dtype = dtype_of(values, folder)
    state = GPT(config.model, device="meta", dtype=dtype).state_dict()
    tensors = {name: Stored(tuple(t.shape), t.dtype) for name, t in state.items()}
    found = (
        pieces(config.model, hub_family(values).model_type, one_by_one=True)
        if "model_type" in values
        else own_pieces(tensors)
    )
    return QuantizedModel(folder, scheme, list(found), tensors)


def dtype_of(values: dict[str, Any], folder: Path) -> torch.dtype:
    """Type of a quantised folder's unquantised tensors and of its products."""
    name = str(values.get("dtype") or values.get("torch_dtype")).removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{folder}: dtype={name} in config.json; a quantised folder has float32, bfloat16 or float16; quantise "
            "the model again"
        )
    result: torch.dtype = dtype
    return result


def put_quantized(model: nn.Module, source: PackedExperts) -> None:
    """Give a model's routed experts the tensors of a source's format, empty and on the same device, usually meta."""
    for path, _, experts in grouped_layers(model):
        room: dict[str, torch.Tensor] = {}
        for name in TENSORS:
            own = getattr(experts, name)
            if name.startswith("b_"):
                room |= {} if own is None else {name: own.detach()}
            else:
                shape, dtype = source.tensors[f"{path}.experts.{name}"]
                room[name] = torch.empty(shape, dtype=dtype, device=experts.w_in.device)
        experts.hold(source.scheme.format, room, dtype=source.products_dtype)
