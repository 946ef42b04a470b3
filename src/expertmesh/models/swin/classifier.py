"""A Swin Transformer as a classifier."""

import math
from collections.abc import Mapping

from torch import Tensor

from expertmesh.models.classifier import ImageScores
from expertmesh.models.swin.model import Swin, SwinOutput


class SwinClassifier:
    """See `expertmesh.models.classifier.Classifier`.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: Swin) -> None:
        self._model = model

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""
        config = self._model.config
        return config.num_channels, config.image_size, config.image_size

    @property
    def num_experts(self) -> Mapping[str, int]:
        """Experts of each MoE block, by its name."""
        return {name: layer.num_experts for name, layer in self._model.moe_blocks()}

    def scores(self, images_BCHW: Tensor) -> ImageScores:
        """Scores of images, and the first choice of every patch in each MoE block."""
        output: SwinOutput = self._model(images_BCHW.to(self._model.head.weight.device))
        experts = {}
        for (name, _), stats in zip(self._model.moe_blocks(), output.stats, strict=True):
            ids_T = stats.topk_expert_ids_TK[:, 0]
            side = math.isqrt(len(ids_T) // len(images_BCHW))
            experts[name] = ids_T.view(-1, side, side)
        return ImageScores(output.logits_BC, experts)
