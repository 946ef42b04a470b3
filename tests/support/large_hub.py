"""Hub folders of any size that take no room on the disk."""

import json
from pathlib import Path

import torch

from expertmesh.checkpoints.hub.configs import model_config
from expertmesh.checkpoints.hub.layout import pieces
from expertmesh.checkpoints.safetensors import FileTensor, file_header


def enlarged(like: Path, folder: Path, *, hidden: int, layers: int, experts: int) -> int:
    """Make a Mixtral like another of other sizes, whose FP32 weights are zeros in a file with holes; returns their
    bytes."""
    folder.mkdir()
    for path in like.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    values = json.loads((folder / "config.json").read_text())
    values |= {"num_hidden_layers": layers, "num_local_experts": experts}
    values["intermediate_size"] = hidden
    (folder / "config.json").write_text(json.dumps(values))
    shapes = {p.hub_name: p.hub_shape for p in pieces(model_config(values), "mixtral")}
    tensors = [FileTensor(name, torch.float32, shape) for name, shape in shapes.items()]
    header = file_header(tensors, {"format": "pt"})
    size = sum(4 * torch.Size(shape).numel() for shape in shapes.values())
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    return size
