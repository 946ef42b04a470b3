"""Finding things in scenes: scenes of small images, a detector on the maps of all of a Swin's stages, and average precision.

The detector is after FCOS (Tian et al. 2019, arXiv 1904.01355), on one map: the maps of all stages are added, coarse to fine (Lin et
al. 2017, arXiv 1612.03144), and every place of the finest says of each class whether the middle of such a thing is near, and how far
its sides are. Boxes are (left, top, right, bottom) in pixels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.data.noise import Draws
from expertmesh_families.swin.model import Swin
from expertmesh.moe.types import RoutingStats

THRESHOLDS = tuple(round(0.5 + 0.05 * step, 2) for step in range(10))
"""Overlaps from which a box counts as found, as in COCO."""
_ALPHA, _GAMMA = 0.25, 2.0
_NEAR = 1.5
_RARE = 0.01
_INK = 64
_SIZES = (0.6, 1.2)
_TRIES = 10


class Scenes(NamedTuple):
    """Scenes and what is in them.

    Attributes:
        images_SCHW: (S, 1, H, W) FP32 from -1 to 1.
        boxes_SM4: (S, M, 4) FP32.
        labels_SM: (S, M) int64; -1: no box.
    """

    images_SCHW: Tensor
    boxes_SM4: Tensor
    labels_SM: Tensor


def compose(
    images_NHW: np.ndarray,
    labels_N: np.ndarray,
    *,
    count: int,
    side: int = 64,
    most: int = 3,
    seed: int = 0,
) -> Scenes:
    """Scenes of 1 to `most` of the images, scaled, on faint noise; they hardly overlap.

    Args:
        images_NHW: uint8, bright things on black.
        labels_N: their classes.
        count: S; scene i depends on the seed and i only.
        side: height and width of a scene.
        most: M.
        seed: of all draws.
    """
    scenes = np.zeros((count, side, side), dtype=np.float32)
    boxes = np.zeros((count, most, 4), dtype=np.float32)
    labels = np.full((count, most), -1, dtype=np.int64)
    for number in range(count):
        draws = Draws(seed, "scene", number)
        scenes[number] = 60 * draws.uniform(side * side).reshape(side, side)
        placed = 0
        for _ in range(1 + int(draws.uniform(1)[0] * most)):
            which, size = draws.uniform(2)
            place = int(which * len(labels_N))
            thing = _scaled(images_NHW[place], _SIZES[0] + size * (_SIZES[1] - _SIZES[0]))
            height, width = thing.shape
            for left, top in draws.uniform(2 * _TRIES).reshape(_TRIES, 2):
                x, y = int(left * (side - width + 1)), int(top * (side - height + 1))
                box = np.array((x, y, x + width, y + height), dtype=np.float32)
                if (_overlap(box[None], boxes[number, :placed]) < 0.1).all():
                    window = scenes[number, y : y + height, x : x + width]
                    np.maximum(window, thing, out=window)
                    boxes[number, placed], labels[number, placed] = box, labels_N[place]
                    placed += 1
                    break
    images = torch.from_numpy(scenes)[:, None] / 127.5 - 1
    return Scenes(images, torch.from_numpy(boxes), torch.from_numpy(labels))


def _scaled(image_HW: np.ndarray, factor: float) -> np.ndarray:
    """The image in another size, cut to its ink."""
    side = max(round(factor * image_HW.shape[0]), 2)
    pixels = torch.from_numpy(image_HW.astype(np.float32))[None, None]
    found = F.interpolate(pixels, (side, side), mode="bilinear", antialias=True)[0, 0].numpy()
    ink = found > min(_INK, found.max() / 2)
    rows, columns = (np.flatnonzero(ink.any(axis)) for axis in (1, 0))
    return np.asarray(found[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])


def _overlap(a_N4: np.ndarray, b_M4: np.ndarray) -> np.ndarray:
    """(N, M) intersection over union."""
    low = np.maximum(a_N4[:, None, :2], b_M4[:, :2])
    high = np.minimum(a_N4[:, None, 2:], b_M4[:, 2:])
    common_NM = np.maximum(high - low, 0).prod(-1)
    areas = [np.maximum(boxes[:, 2:] - boxes[:, :2], 0).prod(-1) for boxes in (a_N4, b_M4)]
    return np.asarray(common_NM / np.maximum(areas[0][:, None] + areas[1] - common_NM, 1e-9))


class Found(NamedTuple):
    """What a detector says of every place of its map.

    Attributes:
        logits_BPC: (B, P, C) of the classes, place by place, row by row.
        sides_BP4: (B, P, 4) pixels from the place to the left, top, right and bottom of its box.
        places_P2: (P, 2) x and y of the places in pixels.
        stats: of the backbone's MoE blocks.
    """

    logits_BPC: Tensor
    sides_BP4: Tensor
    places_P2: Tensor
    stats: tuple[RoutingStats, ...]


class Detector(nn.Module):
    """A detector on the maps of all stages of a Swin.

    Args:
        backbone: with weights; its head and last norm are not used.
        num_classes: C.
        dim: channels of the map on which things are found, a multiple of 8.
    """

    def __init__(self, backbone: Swin, *, num_classes: int, dim: int = 64) -> None:
        super().__init__()
        self.backbone, self.stride = backbone, backbone.config.patch_size
        for unused in (backbone.final_norm, backbone.head):
            unused.requires_grad_(False)
        widths = backbone.config.stage_dims
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in widths)
        self.laterals = nn.ModuleList(nn.Conv2d(width, dim, 1) for width in widths)
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(dim, dim, 3, padding=1), nn.GroupNorm(8, dim), nn.ReLU()]
        self.tower = nn.Sequential(*layers)
        self.classes = nn.Conv2d(dim, num_classes, 3, padding=1)
        self.sides = nn.Conv2d(dim, 4, 3, padding=1)
        # at first nearly nothing is anything, or the empty places would be all of the loss
        nn.init.constant_(self.classes.bias, -math.log((1 - _RARE) / _RARE))

    def forward(self, images_BCHW: Tensor) -> Found:
        """What every place of the finest map says."""
        output = self.backbone(images_BCHW)
        parts = [
            lateral(norm(map_BHWD).permute(0, 3, 1, 2))
            for norm, lateral, map_BHWD in zip(self.norms, self.laterals, output.maps, strict=True)
        ]
        x = parts.pop()
        while parts:
            x = parts.pop() + F.interpolate(x, scale_factor=2.0, mode="nearest")
        x = self.tower(x)
        height, width = x.shape[2:]
        steps = (torch.arange(max(height, width), device=x.device) + 0.5) * self.stride
        y_P, x_P = torch.meshgrid(steps[:height], steps[:width], indexing="ij")
        return Found(
            self.classes(x).flatten(2).transpose(1, 2),
            self.sides(x).flatten(2).transpose(1, 2).clamp(max=4.0).exp() * self.stride,
            torch.stack((x_P, y_P), -1).flatten(0, 1),
            output.stats,
        )


def detection_loss(
    model: Detector, images_BCHW: Tensor, boxes_BM4: Tensor, labels_BM: Tensor
) -> tuple[Tensor, tuple[RoutingStats, ...]]:
    """Focal loss of the classes of all places, and generalised IoU of the boxes where there is a thing, per such place.

    A place belongs to the smallest box that it is in, no farther than 1.5 places from its middle along each axis.

    Args:
        model: the detector.
        images_BCHW: scenes.
        boxes_BM4: see `Scenes`.
        labels_BM: see `Scenes`.

    Returns:
        The loss, and the statistics of the MoE blocks.
    """
    found = model(images_BCHW)
    wanted_BPM4, is_near_BPM = _sides_of(found.places_P2, boxes_BM4, _NEAR * model.stride)
    is_near_BPM = is_near_BPM & (labels_BM >= 0)[:, None]
    areas_BM = (boxes_BM4[..., 2:] - boxes_BM4[..., :2]).prod(-1)
    best_BP = torch.where(is_near_BPM, areas_BM[:, None], math.inf).argmin(-1)
    is_thing_BP = is_near_BPM.any(-1)
    count = is_thing_BP.sum().clamp(min=1)

    labels_BP = labels_BM.gather(1, best_BP)
    one_hot_BPC = F.one_hot(labels_BP.clamp(min=0), found.logits_BPC.shape[-1])
    target_BPC = (one_hot_BPC * is_thing_BP[..., None]).to(found.logits_BPC.dtype)
    plain_BPC = F.binary_cross_entropy_with_logits(found.logits_BPC, target_BPC, reduction="none")
    p_BPC = found.logits_BPC.sigmoid()
    wrong_BPC = p_BPC + target_BPC - 2 * p_BPC * target_BPC
    alpha_BPC = _ALPHA * target_BPC + (1 - _ALPHA) * (1 - target_BPC)
    of_classes = (alpha_BPC * wrong_BPC**_GAMMA * plain_BPC).sum() / count

    wanted_BP4 = wanted_BPM4.gather(2, best_BP[..., None, None].expand(-1, -1, 1, 4))[:, :, 0]
    gain_BP = generalised_overlap(found.sides_BP4, wanted_BP4)
    of_boxes = torch.where(is_thing_BP, 1 - gain_BP, 0.0).sum() / count
    return of_classes + of_boxes, found.stats


def _sides_of(places_P2: Tensor, boxes_BM4: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """(B, P, M, 4) distances of every place to the sides of every box, and (B, P, M) whether it is inside and near the middle."""
    places = places_P2[None, :, None]
    low, high = boxes_BM4[:, None, :, :2], boxes_BM4[:, None, :, 2:]
    sides = torch.cat((places - low, high - places), -1)
    near = ((places - (low + high) / 2).abs() < radius).all(-1)
    return sides, near & (sides > 0).all(-1)


def generalised_overlap(a_sides: Tensor, b_sides: Tensor) -> Tensor:
    """(...) generalised IoU (Rezatofighi et al. 2019) of two boxes around one place, from (..., 4) distances to their sides."""
    smaller, larger = torch.minimum(a_sides, b_sides), torch.maximum(a_sides, b_sides)
    # boxes that do not share the place have no common part along an axis
    common, hull, a, b = (
        (sides[..., :2] + sides[..., 2:]).clamp(min=0).prod(-1)
        for sides in (smaller, larger, a_sides, b_sides)
    )
    union = (a + b - common).clamp(min=1e-6)
    hull = hull.clamp(min=1e-6)
    return common / union - (hull - union) / hull


class Answers(NamedTuple):
    """Boxes found in one scene, the surest first.

    Attributes:
        boxes_N4: in pixels.
        labels_N: their classes.
        scores_N: how sure, from 0 to 1.
    """

    boxes_N4: np.ndarray
    labels_N: np.ndarray
    scores_N: np.ndarray


@torch.no_grad()
def detect(
    model: Detector,
    images_BCHW: Tensor,
    *,
    least: float = 0.05,
    candidates: int = 60,
    most: int = 12,
    overlap: float = 0.5,
) -> list[Answers]:
    """What is in each scene; of boxes of one class that overlap the surest stays.

    Args:
        model: in evaluation mode.
        images_BCHW: scenes.
        least: score of an answer.
        candidates: the surest places and classes of a scene, from which answers are taken.
        most: answers of a scene.
        overlap: from which two boxes are one.
    """
    found = model(images_BCHW)
    answers = []
    for logits_PC, sides_P4 in zip(found.logits_BPC, found.sides_BP4, strict=True):
        scores, order = logits_PC.sigmoid().flatten().topk(min(candidates, logits_PC.numel()))
        places = order[scores > least].div(logits_PC.shape[-1], rounding_mode="floor")
        labels_N = (order[scores > least] % logits_PC.shape[-1]).numpy()
        middle, sides = found.places_P2[places], sides_P4[places]
        boxes_N4 = torch.cat((middle - sides[:, :2], middle + sides[:, 2:]), -1).numpy()
        kept = surest(boxes_N4, labels_N, overlap=overlap)[:most]
        answers.append(
            Answers(boxes_N4[kept], labels_N[kept], scores[scores > least].numpy()[kept])
        )
    return answers


def surest(boxes_N4: np.ndarray, labels_N: np.ndarray, *, overlap: float) -> list[int]:
    """Places of the boxes that stay: each that overlaps no earlier one of its class which stays."""
    same_NN = (_overlap(boxes_N4, boxes_N4) > overlap) & (labels_N[:, None] == labels_N)
    kept: list[int] = []
    for place in range(len(boxes_N4)):
        if not same_NN[place, kept].any():
            kept.append(place)
    return kept


class Matches(NamedTuple):
    """Which answers are right.

    Attributes:
        scenes_N: scene of each answer.
        labels_N: its class.
        scores_N: how sure it is.
        hits_NT: whether it found a thing, by `THRESHOLDS`.
        truths_SC: things of each class in each scene.
    """

    scenes_N: np.ndarray
    labels_N: np.ndarray
    scores_N: np.ndarray
    hits_NT: np.ndarray
    truths_SC: np.ndarray


def matched(answers: Sequence[Answers], truth: Scenes, *, num_classes: int) -> Matches:
    """Answers beside the truth: the surest answer of a class takes the thing that it overlaps most of those that are left."""
    boxes_SM4, labels_SM = truth.boxes_SM4.numpy(), truth.labels_SM.numpy()
    truths_SC = np.stack([(labels_SM == label).sum(1) for label in range(num_classes)], 1)
    hits = []
    for one, boxes_M4, labels_M in zip(answers, boxes_SM4, labels_SM, strict=True):
        overlaps_NM = _overlap(one.boxes_N4, boxes_M4) * (one.labels_N[:, None] == labels_M)
        hits_NT = np.zeros((len(one.labels_N), len(THRESHOLDS)), dtype=bool)
        for column, least in enumerate(THRESHOLDS):
            left = overlaps_NM.copy()
            for place in np.argsort(-one.scores_N, kind="stable"):
                thing = int(left[place].argmax())
                if left[place, thing] >= least:
                    hits_NT[place, column] = True
                    left[:, thing] = 0.0
        hits.append(hits_NT)
    counts = [len(one.labels_N) for one in answers]
    return Matches(
        np.repeat(np.arange(len(answers)), counts),
        np.concatenate([one.labels_N for one in answers]),
        np.concatenate([one.scores_N for one in answers]),
        np.concatenate(hits),
        truths_SC,
    )


def average_precision(matches: Matches, weights_S: np.ndarray | None = None) -> np.ndarray:
    """(T,) average precision by `THRESHOLDS`, the mean over the classes that there are.

    Of a class it is the area under precision as a function of recall, where precision is the highest at this recall or a larger one.

    Args:
        matches: of all scenes.
        weights_S: how often each scene counts; None: once.
    """
    weights_S = np.ones(len(matches.truths_SC)) if weights_S is None else weights_S
    order = np.argsort(-matches.scores_N, kind="stable")
    areas = []
    for label, things in enumerate(weights_S @ matches.truths_SC):
        if not things:
            continue
        rows = order[matches.labels_N[order] == label]
        often_N1 = weights_S[matches.scenes_N[rows], None]
        hits_NT = matches.hits_NT[rows] * often_N1
        precision_NT = hits_NT.cumsum(0) / np.maximum(often_N1.cumsum(0), 1)
        best_NT = np.maximum.accumulate(precision_NT[::-1], 0)[::-1]
        areas.append((best_NT * hits_NT).sum(0) / things)
    return np.asarray(np.mean(areas, 0))
