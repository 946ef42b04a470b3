"""Image data of a run: images of several folders, fitted to the model's size, augmented, in a fixed order."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.base import cache_root, parse_json
from expertmesh.data.cache_entry import INDEX, fill_once
from expertmesh.data.order import shuffled, spread_batches
from expertmesh.data.paths import distinct
from expertmesh.errors import CheckpointError, ConfigError, named
from expertmesh_families.swin.augment import changed, mix_of, mixed
from expertmesh_families.swin.config import Fit, ImagesConfig
from expertmesh_families.swin.image_files import (
    ImageError,
    Images,
    LabelledFolder,
    read_folder,
    refuse_images,
)

CLASSES_FILE = "classes.json"
"""File of a run with the names of its classes."""
_FORMAT_VERSION = 1
_LARGEST_IN_MEMORY = 1 << 30

Batch = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images (B, C, H, W) FP32 from -1 to 1, their classes (B,), classes of their mixing partners (B,), weights of their
own classes (B,)."""


class ImageData:
    """Images of one or several folders; the classes of each folder are numbered after the previous folder's."""

    def __init__(
        self,
        config: ImagesConfig,  # folders and augmentation
        *,
        image_size: int,  # height and width of the model's input
        num_channels: int,  # 1 or 3
        num_classes: int,  # classes of the model's head
        seed: int,  # seed of order and augmentation
    ) -> None:
        self._config, self._seed = config, seed
        folders = _read_folders(config)
        # distinct names for folders of the same name in different places
        placed = list(zip(distinct(Path(path).name for path in config.path), folders, strict=True))
        # names of the classes
        self.classes = tuple(
            name if len(placed) == 1 else f"{place}/{name}" for place, folder in placed for name in folder.classes
        )
        # name of each class's folder, numbered if an earlier folder has the same name
        self.folder_of_class = tuple(place for place, folder in placed for _ in folder.classes)
        if len(self.classes) < 2:
            raise ConfigError(
                "data.path",
                " ".join(config.path),
                f"has images of one class, {self.classes[0]}",
                "to tell classes apart there must be two or more: name the folder that has one for each class",
            )
        if len(self.classes) > num_classes:
            raise ConfigError(
                "model.num_classes",
                num_classes,
                f"the data have {len(self.classes)} classes",
                f"use {named('model.num_classes', len(self.classes))}",
            )
        size = (num_channels, image_size, image_size)
        self._sides = tuple(
            _Side(folders, is_training=is_training, size=size, fit=config.fit) for is_training in (True, False)
        )
        problems = [problem for side in self._sides for problem in side.load()]
        refuse_images(problems, sum(map(len, self._sides)))
        dependent = config.model_dump(exclude={"path", "cache_dir"})
        parts = [_FORMAT_VERSION, dependent, size, self.classes, [s.digest for s in self._sides]]
        self.key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        training, validation = self._sides
        self.num_validation = len(validation)  # number of validation samples
        self.description = (
            f"{len(training):,} training and {len(validation):,} validation images of {len(self.classes)} classes in "
            f"{', '.join(config.path)}"
        )
        entry = cache_root(config.cache_dir) / "images" / self.key[:32]

        def fill(folder: Path) -> None:
            (folder / INDEX).write_text(json.dumps(self.classes) + "\n")

        fill_once(entry, fill)
        self.files: Mapping[str, Path] = {CLASSES_FILE: entry / INDEX}

    def batch(self, first_sample: int, num_samples: int) -> Batch:
        """Training samples first_sample ... first_sample + num_samples - 1, augmented."""
        side, config, seed = self._sides[0], self._config, self._seed
        samples = list(range(first_sample, first_sample + num_samples))
        which = shuffled(first_sample, num_samples, total=len(side), seed=seed)
        images, labels_B = side.take(which)
        images = changed(images, samples, config, seed=seed)
        mixes = [mix_of(sample, config, seed=seed) for sample in samples]
        if not any(mixes):
            return _normal(images), labels_B, labels_B, torch.ones(num_samples)
        others = [
            place if mix is None else int(mix.partner * len(side)) for place, mix in zip(which, mixes, strict=True)
        ]
        partners, partner_labels_B = side.take(others)
        partners = changed(partners, [-1 - sample for sample in samples], config, seed=seed)
        images, weights_B = mixed(images, partners, mixes)
        return _normal(images), labels_B, partner_labels_B, weights_B

    def validation(self, max_samples: int | None, batch_size: int) -> Iterator[Batch]:
        """Batches of at most max_samples validation images (None: all), evenly spread, without augmentation."""
        side = self._sides[1]
        for which in spread_batches(len(side), max_samples, batch_size):
            images, labels_B = side.take(which)
            yield _normal(images), labels_B, labels_B, torch.ones(len(labels_B))

    def neighbours(self, count: int, *, most_distances: int) -> Tensor | None:
        """Mask (images,) bool of the validation images that k nearest neighbours by Euclidean distance of pixels
        classify correctly.

        Args:
            count: number k of training images that vote; ties go to the lowest class.
            most_distances: maximum number of image pairs to compare; None is returned for more.
        """
        training, validation = self._sides
        if len(training) * len(validation) > most_distances or training.pixels_NCHW is None:
            return None
        known_ND, labels_N = training.take(range(len(training)))
        known_ND = known_ND.flatten(1)
        squares_N = known_ND.square().sum(1)
        right = []
        for start in range(0, len(validation), 256):
            images, labels_B = validation.take(range(start, min(start + 256, len(validation))))
            distances_BN = squares_N - 2 * images.flatten(1) @ known_ND.T
            near = distances_BN.topk(min(count, len(training)), largest=False).indices
            votes_BC = F.one_hot(labels_N[near], len(self.classes)).sum(1)
            right.append(votes_BC.argmax(1) == labels_B)
        return torch.cat(right)


class _Side:
    """Training or validation images of all folders; `pixels_NCHW` holds them if they fit into memory."""

    def __init__(
        self,
        folders: Sequence[LabelledFolder],
        *,
        is_training: bool,
        size: tuple[int, int, int],
        fit: Fit,
    ) -> None:
        sources = [folder.training if is_training else folder.validation for folder in folders]
        self._sources, self._size, self._fit = sources, size, fit
        counts = [len(images.labels_N) for images in sources]
        self._starts = np.cumsum([0, *counts])
        first = np.cumsum([0, *[len(folder.classes) for folder in folders]])
        labels = [images.labels_N + first[i] for i, images in enumerate(sources)]
        self.labels_N = torch.from_numpy(np.concatenate(labels))
        self.digest = [images.digest for images in sources]
        self.pixels_NCHW: Tensor | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def load(self) -> list[str]:
        """Read all images if they fit into memory; return messages for unreadable ones."""
        if len(self) * int(np.prod(self._size)) > _LARGEST_IN_MEMORY:
            return []
        pixels, problems = [], []
        for place in range(len(self)):
            try:
                pixels.append(self._read(place))
            except ImageError as error:
                problems.append(error.line.text)
        if not problems:
            self.pixels_NCHW = torch.stack(pixels)
        return problems

    def take(self, which: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) FP32 in [0, 1], and their classes (B,)."""
        if self.pixels_NCHW is not None:
            pixels = self.pixels_NCHW[list(which)]
        else:
            pixels = torch.stack([self._read(i) for i in which])
        return pixels.to(torch.float32) / 255, self.labels_N[list(which)]

    def _read(self, place: int) -> Tensor:
        source = int(np.searchsorted(self._starts, place, side="right")) - 1
        images: Images = self._sources[source]
        index = place - int(self._starts[source])
        pixels = images.read(index)
        try:
            return fitted(pixels, size=self._size, fit=self._fit)
        except ConfigError as error:
            raise ConfigError(f"{images.name(index)}: {error.line.text}") from None


def _read_folders(config: ImagesConfig) -> list[LabelledFolder]:
    if not config.path:
        raise ConfigError(
            f"{named('data.path', '()')}: no images; name a folder with one folder of images per class, or with IDX "
            "files as MNIST's (images-idx3-ubyte, labels-idx1-ubyte)"
        )
    counts: list[int | None] = [*config.train_images] or [None]
    counts = counts * len(config.path) if len(counts) == 1 else counts
    return [
        read_folder(path, num_train=count, validation_fraction=config.validation_fraction)
        for path, count in zip(config.path, counts, strict=True)
    ]


def fitted(pixels: np.ndarray, *, size: tuple[int, int, int], fit: Fit) -> Tensor:
    """Image fitted to a model's input size.

    Args:
        pixels: uint8, (H, W) or (H, W, 3).
        fit: see `ImagesConfig`; "resize" scales the centre square, bicubic with antialiasing.

    Returns:
        uint8 image of that size.
    """
    image_CHW = torch.from_numpy(np.ascontiguousarray(np.atleast_3d(pixels).transpose(2, 0, 1)).copy())
    channels, side, _ = size
    if channels == 3:
        image_CHW = image_CHW.expand(3, -1, -1)
    elif len(image_CHW) == 3:
        grey = image_CHW.to(torch.float32) * torch.tensor([0.299, 0.587, 0.114])[:, None, None]
        image_CHW = grey.sum(0, keepdim=True).round().to(torch.uint8)
    H, W = image_CHW.shape[1:]
    if (side, side) == (H, W):
        return image_CHW
    if fit == "exact" or (fit == "pad" and max(H, W) > side):
        rule = "must be that" if fit == "exact" else "must be at most that to be padded"
        raise ConfigError(
            f"image of {H} x {W} pixels, model of {side} x {side}: {rule}; use {named('data.fit', 'resize')}"
        )
    if fit == "pad":
        top, left = (side - H) // 2, (side - W) // 2
        return F.pad(image_CHW, (left, side - W - left, top, side - H - top))
    short = min(H, W)
    top, left = (H - short) // 2, (W - short) // 2
    square = image_CHW[None, :, top : top + short, left : left + short].to(torch.float32)
    if short != side:
        square = F.interpolate(square, (side, side), mode="bicubic", antialias=True)
    return square[0].round().clamp(0, 255).to(torch.uint8)


def class_names(path: Path) -> tuple[str, ...]:
    """Names of a run's classes, read from its `CLASSES_FILE`."""
    try:
        names = parse_json(path.read_bytes())
        if not names or not all(isinstance(name, str) for name in names):
            raise ValueError("no list of names")
    except (ValueError, TypeError, OSError) as error:
        raise CheckpointError(f"{path}: is damaged ({error}); restore it from a copy") from None
    return tuple(names)


def model_input(pixels: np.ndarray, *, size: tuple[int, int, int], fit: Fit) -> Tensor:
    """Image as input of a model, (C, H, W) FP32 from -1 to 1; see `fitted`."""
    return _normal(fitted(pixels, size=size, fit=fit).to(torch.float32) / 255)


def _normal(images: Tensor) -> Tensor:
    return images * 2 - 1
