"""Classes of images by the model of a run, and which experts took their patches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.data.data_progress import Progress
from expertmesh.errors import ConfigError
from expertmesh.models.classifier import Classifier
from expertmesh.models.swin.config import Fit
from expertmesh.models.swin.image_files import ImageError, read_image_or_idx, refuse_images
from expertmesh.models.swin.images import model_input


@dataclass(frozen=True)
class Classified:
    """What a model says of an image.

    Attributes:
        name: of the image.
        classes: names of all classes.
        probabilities: of each class.
        pixels_CHW: the image as the model saw it, FP32 from -1 to 1, on the CPU.
        experts: by name of each MoE block, the (H, W) int64 expert of every patch, its first choice; num_experts for none.
        num_experts: of each of these blocks.
    """

    name: str
    classes: tuple[str, ...]
    probabilities: tuple[float, ...]
    pixels_CHW: Tensor
    experts: dict[str, Tensor]
    num_experts: Mapping[str, int]


def read_images(names: Sequence[str], *, size: tuple[int, int, int], fit: Fit) -> list[Tensor]:
    """Image files as a model wants them, (C, H, W) FP32 each.

    Args:
        names: image files, or FILE@N for the N-th image of an IDX file.
        size: channels, height and width.
        fit: see `ImagesConfig`.

    Raises:
        ConfigError: images cannot be read or do not fit; the first few are named.
    """
    found, problems = [], []
    for name in Progress("read", total=len(names), unit="images").over(names):
        try:
            pixels = read_image_or_idx(name)
        except ImageError as error:
            problems.append(error.line.text)
            continue
        try:
            found.append(model_input(pixels, size=size, fit=fit))
        except ConfigError as error:
            problems.append(f"{name}: {error.line.text}")
    refuse_images(problems, len(names))
    return found


@torch.no_grad()
def classify(
    model: Classifier,
    images: Sequence[Tensor],
    names: Sequence[str],
    *,
    classes: Sequence[str],
    batch_size: int,
) -> list[Classified]:
    """Classify images.

    Args:
        model: what `ModelBuilder.classifier` returns of one in evaluation mode.
        images: (C, H, W) each, as `read_images` returns them.
        names: of the images.
        classes: names of the classes; a head may have more.
        batch_size: images at a time.
    """
    found: list[Classified] = []
    told = Progress("classified", total=len(images), unit="images")
    for start in range(0, len(images), batch_size):
        told.at(start)
        pixels_BCHW = torch.stack(list(images[start : start + batch_size]))
        scores = model.scores(pixels_BCHW)
        logits_BC = scores.logits_BC[:, : len(classes)].float()
        for row, probabilities in enumerate(logits_BC.softmax(1).tolist()):
            taken = {name: ids_BHW[row].cpu() for name, ids_BHW in scores.experts.items()}
            found.append(
                Classified(
                    names[start + row],
                    tuple(classes),
                    tuple(probabilities),
                    pixels_BCHW[row],
                    taken,
                    model.num_experts,
                )
            )
    told.finish()
    return found
