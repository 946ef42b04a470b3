"""Interface of image classifiers: class logits, and the expert that each patch was routed to."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor


class ImageScores(NamedTuple):
    """Class logits and expert choices for a batch of images."""

    logits_BC: Tensor  # (B, C) class logits
    # (B, H, W) int64 first-choice expert of every patch, by name of the MoE block; empty for a dense model
    experts: Mapping[str, Tensor]


class Classifier(Protocol):
    """A model that classifies images."""

    @property
    def size(self) -> tuple[int, int, int]:
        """Channels, height and width of the input images."""

    @property
    def num_experts(self) -> Mapping[str, int]:
        """Experts of each MoE block, by its name."""

    def scores(self, images_BCHW: Tensor) -> ImageScores:
        """Class logits and expert choices of images, which are FP32 from -1 to 1 and on any device."""
