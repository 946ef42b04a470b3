"""Experts of hub folders in the format of their files: FP8 with a scale per block, and MXFP4, whose numbers keep their
values."""

from pathlib import Path

import torch
from torch import Tensor

from expertmesh.checkpoints.hub.load_pretrained import HubModel
from expertmesh.checkpoints.rounded import ExpertFormat, RoundedExperts
from expertmesh.checkpoints.safetensors import quant_method, read_json
from expertmesh.checkpoints.source import TensorSource
from expertmesh.ops.experts.weights import Kept


def format_of_files(folder: Path) -> str | None:
    """Format of the experts in a hub folder's files, fp8 or mxfp4; None: another."""
    method = quant_method(read_json(folder / "config.json"))
    return method if method in ("fp8", "mxfp4") else None


class Fp8Experts(RoundedExperts):
    """Tensors of a hub model with experts in FP8; values and scales of files in FP8 are kept."""

    def __init__(self, hub: HubModel, scheme: ExpertFormat, source: TensorSource | None = None) -> None:
        super().__init__(hub if source is None else source, scheme)
        self._hub = hub

    def _kept(self, shape: tuple[int, ...]) -> dict[str, Kept]:
        """Scales in FP32, as files have them."""
        return self._form.kept(shape, torch.float32)

    def _made(self, matrix: str, expert: int, device: torch.device) -> dict[str, Tensor]:
        stored = self._hub.stored_fp8(matrix, expert)
        if stored is None:
            return super()._made(matrix, expert, device)
        return dict(zip(("", "_scale"), stored, strict=True))
