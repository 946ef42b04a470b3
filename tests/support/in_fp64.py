"""Programs that ask for FP32 by name, computed in FP64: what transformers means, without what its norms, angles and
routers round."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class InFP64(TorchFunctionMode):
    """Answers every request for FP32 (`.float()`, `dtype=torch.float32`) in FP64; of a model, from its making on.

    Attributes:
        margin: the least distance between the last score that a `topk` took and the first that it left, of all calls so
            far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.margin = float("inf")

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """One call of PyTorch."""
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(map(_widened, args))
        kwargs = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func in (torch.topk, torch.Tensor.topk):
            self._note(*args, **kwargs)
        return func(*args, **kwargs)

    def _note(self, scores: Tensor, k: int, dim: int = -1, **_: Any) -> None:
        if k < scores.shape[dim] and scores.numel():
            ranked = scores.detach().sort(dim, descending=True).values
            gap = ranked.select(dim, k - 1) - ranked.select(dim, k)
            self.margin = min(self.margin, gap.min().item())


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value
