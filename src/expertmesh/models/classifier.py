"""What classification needs of a model: images in, scores of classes out, and which experts took which patch."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class ImageScores(NamedTuple):
    """What a model says of some images.

    Attributes:
        logits_BC: (B, C) of the classes.
        experts: by the name of each MoE block the (B, H, W) int64 first choice of every patch; none of a dense model.
    """

    logits_BC: Tensor
    experts: Mapping[str, Tensor]


class Classifier(Protocol):
    """A model that classifies images."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of its images."""

    @property
    def num_experts(self) -> Mapping[str, int]:
        """Experts of each MoE block, by its name."""

    def scores(self, images_BCHW: Tensor) -> ImageScores:
        """Scores of images, FP32 from -1 to 1, on any device."""
