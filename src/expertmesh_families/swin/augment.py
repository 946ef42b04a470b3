"""Augmentation of training images: affine transforms, flips, colour changes, random erasing, mixup and cutmix.

The augmentation of a sample depends on the seed and its number only, not on the batch.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.data.noise import Draws
from expertmesh_families.swin.config import ImagesConfig

_DEGREE = np.pi / 180
_NUM_DRAWS = 13
_ERASED_AREA = (0.02, 1 / 3)


@dataclass(frozen=True)
class Mix:
    """Mixup or cutmix of a sample with a partner."""

    partner: float  # number in [0, 1) that selects the partner
    weight: float  # weight of the sample; the partner's is 1 - weight
    # cutmix: rectangle with the partner's pixels, (top, left, bottom, right) as fractions of the sides. None: mixup.
    box: tuple[float, float, float, float] | None


def changed(images_BCHW: Tensor, samples: list[int], config: ImagesConfig, *, seed: int) -> Tensor:
    """Augmented copies of images.

    Args:
        images_BCHW: (B, C, H, W) FP32 images in [0, 1].
        samples: number of each sample, which with the seed determines its augmentation.
    """
    draws_BN = np.stack([Draws(seed, "augment", i).uniform(_NUM_DRAWS) for i in samples])
    signed_BN = 2 * draws_BN - 1
    if any((config.flip, config.rotate, config.shift, config.zoom, config.stretch, config.shear)):
        images_BCHW = _moved(images_BCHW, draws_BN, signed_BN, config)
    if config.colour:
        images_BCHW = _recoloured(images_BCHW, 1 + config.colour * signed_BN[:, 6:8])
    if config.erase:
        images_BCHW = _erased(images_BCHW, samples, draws_BN[:, 8:12], config.erase, seed=seed)
    return images_BCHW


def _moved(images_BCHW: Tensor, draws_BN: np.ndarray, signed_BN: np.ndarray, config: ImagesConfig) -> Tensor:
    """Images after a random affine transform and flip, with zeros outside the original."""
    angle = signed_BN[:, 0] * config.rotate * _DEGREE
    scale = (1 - config.zoom) ** signed_BN[:, 1]
    shear = signed_BN[:, 2] * config.shear
    mirror = np.where(config.flip & (draws_BN[:, 3] < 0.5), -1.0, 1.0)
    cos, sin = np.cos(angle) * scale, np.sin(angle) * scale
    places_B23 = np.empty((len(angle), 2, 3))
    # maps pixels of the result to the original; coordinates are from -1 to 1
    places_B23[:, 0, 0], places_B23[:, 0, 1] = mirror * cos, mirror * (shear * cos - sin)
    places_B23[:, 1, 0], places_B23[:, 1, 1] = sin, shear * sin + cos
    narrower_B = (1 - config.stretch) ** (signed_BN[:, 12] / 2)  # square root of the aspect ratio
    places_B23[:, 0, :2] *= narrower_B[:, None]
    places_B23[:, 1, :2] /= narrower_B[:, None]
    places_B23[:, :, 2] = 2 * config.shift * signed_BN[:, 4:6]
    grid = F.affine_grid(torch.from_numpy(places_B23).to(images_BCHW), list(images_BCHW.shape), align_corners=False)
    return F.grid_sample(images_BCHW, grid, padding_mode="zeros", align_corners=False)


def _recoloured(images_BCHW: Tensor, factors_B2: np.ndarray) -> Tensor:
    bright_B1, contrast_B1 = torch.from_numpy(factors_B2).to(images_BCHW)[:, :, None, None, None].unbind(1)
    images_BCHW = images_BCHW * bright_B1
    mean_B1 = images_BCHW.mean((1, 2, 3), keepdim=True)
    return (mean_B1 + (images_BCHW - mean_B1) * contrast_B1).clamp(0, 1)


def _erased(images_BCHW: Tensor, samples: list[int], draws_BN: np.ndarray, share: float, *, seed: int) -> Tensor:
    """Images with a rectangle of 2 to 33 % of the area replaced by uniform noise (random erasing, Zhong et al.
    2020)."""
    images_BCHW = images_BCHW.clone()
    C, H, W = images_BCHW.shape[1:]
    low, high = _ERASED_AREA
    for image, sample, (first, second, top, left) in zip(images_BCHW, samples, draws_BN, strict=True):
        if first >= share:
            continue
        side = (low + (high - low) * second) ** 0.5
        height, width = max(round(side * H), 1), max(round(side * W), 1)
        y, x = int(top * (H - height + 1)), int(left * (W - width + 1))
        noise = Draws(seed, "erase", sample).uniform(C * height * width)
        image[:, y : y + height, x : x + width] = torch.from_numpy(noise).view(C, height, width)
    return images_BCHW


def mix_of(sample: int, config: ImagesConfig, *, seed: int) -> Mix | None:
    """Mixup or cutmix of a sample; None: it is not mixed.

    Mixup (Zhang et al. 2018) adds two images. Cutmix (Yun et al. 2019) pastes a rectangle of one into the other. The
    classes have the same weights as the images.
    """
    if not config.mixup and not config.cutmix:
        return None
    draws = Draws(seed, "mix", sample)
    happens, which, partner, top, left = draws.uniform(5)
    if happens >= config.mix:
        return None
    pastes = which < 0.5 if config.mixup and config.cutmix else bool(config.cutmix)
    weight = _beta(draws, config.cutmix if pastes else config.mixup)
    if not pastes:
        return Mix(partner, weight, None)
    half = (1 - weight) ** 0.5 / 2
    box = (max(top - half, 0.0), max(left - half, 0.0), min(top + half, 1.0), min(left + half, 1.0))
    return Mix(partner, weight, box)


def _beta(draws: Draws, alpha: float) -> float:
    """Sample of Beta(alpha, alpha), by Joehnk's method."""
    while True:
        x, y = draws.uniform(2) ** (1 / alpha)
        if 0 < x + y <= 1:
            return float(x / (x + y))


def mixed(images_BCHW: Tensor, partners_BCHW: Tensor, mixes: list[Mix | None]) -> tuple[Tensor, Tensor]:
    """Mixed images, and the (B,) FP32 weight of each sample's own class; for cutmix its exact fraction of the
    pixels."""
    images_BCHW = images_BCHW.clone()
    H, W = images_BCHW.shape[2:]
    weights = []
    for image, partner, mix in zip(images_BCHW, partners_BCHW, mixes, strict=True):
        weight = 1.0 if mix is None else mix.weight
        if mix is not None and mix.box is None:
            image.lerp_(partner, 1 - mix.weight)
        elif mix is not None and mix.box is not None:
            top, left, bottom, right = (round(edge * side) for edge, side in zip(mix.box, (H, W, H, W), strict=True))
            image[:, top:bottom, left:right] = partner[:, top:bottom, left:right]
            weight = 1 - (bottom - top) * (right - left) / (H * W)
        weights.append(weight)
    return images_BCHW, torch.tensor(weights, dtype=torch.float32)
