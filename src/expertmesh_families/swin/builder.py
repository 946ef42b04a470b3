"""Builder of Swin Transformers: construction, weights of earlier runs, interface for classification."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.config.base import expanded
from expertmesh.config.run import RunConfig
from expertmesh.models.builder import ModelBuilder
from expertmesh_families.swin.config import SwinRunConfig
from expertmesh_families.swin.images import CLASSES_FILE, ImageData, class_names
from expertmesh_families.swin.model import Swin


class SwinBuilder(ModelBuilder):
    """Builder of a run's Swin Transformer."""

    config: SwinRunConfig
    is_built_empty = True

    def build(self, *, device: torch.device | str, dtype: torch.dtype) -> Swin:
        """The whole model on one device, with weights drawn from the run's seed."""
        return Swin(self.config.model, device=device, dtype=dtype, seed=self.config.train.seed)

    def blocks(self, model: nn.Module) -> Iterable[nn.Module]:
        """The blocks of all stages."""
        assert isinstance(model, Swin)
        return model.blocks()

    @torch.no_grad()
    def inherited(self, model: nn.Module, begin: RunConfig, data: Any) -> Mapping[str, Tensor]:
        """All tensors, but without the head if the classes differ in number or names; the head then starts at zero."""
        assert isinstance(model, Swin) and isinstance(begin, SwinRunConfig)
        assert isinstance(data, ImageData)
        tensors = model.state_dict()
        theirs = class_names(expanded(self.config.train.init_from or ".") / CLASSES_FILE)
        sizes = {found.model.num_classes for found in (begin, self.config)}
        if len(sizes) > 1 or theirs != data.classes:
            for name in ("head.weight", "head.bias"):
                tensors.pop(name).zero_()
        return tensors

    def classifier(self, model: nn.Module) -> Swin:
        """The model itself."""
        assert isinstance(model, Swin)
        return model
