"""Classification of images by a run's model, with the expert that each patch was routed to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.data.data_progress import Progress
from expertmesh.errors import ConfigError
from expertmesh.models.classifier import Classifier
from expertmesh_families.swin.config import Fit
from expertmesh_families.swin.image_files import ImageError, read_image_or_idx, refuse_images
from expertmesh_families.swin.images import model_input


@dataclass(frozen=True)
class Classified:
    """Class probabilities and expert choices for an image."""

    name: str  # name of the image
    classes: tuple[str, ...]  # names of all classes
    probabilities: tuple[float, ...]
    pixels_CHW: Tensor  # (C, H, W) input of the model, FP32 from -1 to 1, on the CPU
    # (H, W) int64 first-choice expert of every patch, by name of the MoE block; num_experts stands for no expert
    experts: dict[str, Tensor]
    num_experts: Mapping[str, int]  # number of experts, by name of the MoE block


def read_images(names: Sequence[str], *, size: tuple[int, int, int], fit: Fit) -> list[Tensor]:
    """Image files as inputs of a model, (C, H, W) FP32 each."""
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
    model: Classifier,  # classifier from `ModelBuilder.classifier`, in evaluation mode
    images: Sequence[Tensor],  # (C, H, W) each, as `read_images` returns them
    names: Sequence[str],  # names of the images
    *,
    classes: Sequence[str],  # names of the classes; further outputs of the head are ignored
    batch_size: int,  # images per forward pass
) -> list[Classified]:
    """Classify images."""
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
