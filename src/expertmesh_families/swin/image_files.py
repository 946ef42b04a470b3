"""Labelled images on disk: a folder per class, or IDX files like MNIST's."""

import gzip
import hashlib
import os
import re
import struct
import warnings
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expertmesh.config.base import expanded
from expertmesh.data.data_progress import note
from expertmesh.data.encoding import NotTextError, decoded, remedy
from expertmesh.data.files import LeftOut
from expertmesh.errors import ConfigError, named

_NAMED = 5
"""Limit of images that a message names; further ones are counted."""
ENDINGS = (".png", ".jpg", ".jpeg", ".jfif", ".bmp", ".gif", ".webp", ".tif", ".tiff")
_IDX = re.compile(r"(?:(?P<split>\w+)[-.])?images[-.]idx3-ubyte(?:\.gz)?")
_UNSIGNED_BYTE = 8
_TRAIN, _VALIDATION = (
    ("train", "training"),
    ("val", "valid", "validation", "test", "testing", "t10k"),
)
_CLASSES = "classes.txt"


class ImageError(ConfigError):
    """Error of one image; the message begins with its name."""


def refuse_images(problems: Sequence[str], total: int) -> None:
    """Raise one ConfigError for all images that cannot be used."""
    if len(problems) == 1:
        raise ConfigError(problems[0])
    if problems:
        more = len(problems) - _NAMED
        rest = f" | and {more:,} more" if more > 0 else ""
        raise ConfigError(
            f"{len(problems):,} of {total:,} images cannot be used: {' | '.join(problems[:_NAMED])}{rest}"
        )


@dataclass(frozen=True)
class Images:
    """Labelled images, read on demand."""

    labels_N: np.ndarray  # (N,) int64 classes
    read: Callable[[int], np.ndarray]  # returns the i-th image, uint8, (H, W) or (H, W, 3)
    name: Callable[[int], str]  # returns the name of the i-th image for messages
    digest: str  # digest of names and sizes of the files, or of their contents

    def take(self, which: np.ndarray) -> "Images":
        """The images at the given indices, in this order."""
        digest = hashlib.sha256(f"{self.digest} {which.tolist()}".encode()).hexdigest()
        return Images(
            self.labels_N[which],
            lambda i: self.read(int(which[i])),
            lambda i: self.name(int(which[i])),
            digest,
        )


@dataclass(frozen=True)
class LabelledFolder:
    """Classes and images of one folder."""

    classes: tuple[str, ...]  # names of the classes
    training: Images
    validation: Images


def read_folder(folder: str | Path, *, num_train: int | None, validation_fraction: float) -> LabelledFolder:
    """Find the images of a folder; IDX files are read at once, other images on demand.

    Args:
        folder: folder with IDX files, or with a folder per class, perhaps below train/ and val/.
        num_train: number of training images, the first ones, for IDX files without a split; None: by the fraction.
        validation_fraction: share of the images for validation if there is no split.
    """
    path = expanded(folder)
    if not path.is_dir():
        raise ConfigError(
            "data.path",
            folder,
            "is no folder",
            "give one with a folder of images per class, or with IDX files",
        )
    names = sorted(p.name for p in path.iterdir())
    if found := {m["split"]: path / m[0] for n in names if (m := _IDX.fullmatch(n))}:
        return _idx_folder(path, found, num_train, validation_fraction)
    if num_train:
        raise _has_no_use(num_train, path)
    to_learn, to_validate = (_below(path, wanted) for wanted in (_TRAIN, _VALIDATION))
    left_out = LeftOut()
    if to_learn is not None and to_validate is not None:
        classes, training = _class_folders(to_learn, left_out)
        _, validation = _class_folders(to_validate, left_out, classes)
        _note_left_out(path, left_out)
        return LabelledFolder(classes, training, validation)
    if only := to_learn or to_validate:
        lacks = "train/" if to_learn is None else "val/ or test/"
        raise ConfigError(
            "data.path",
            path,
            f"has {only.name}/ and no {lacks} beside it",
            f"add one, or name {only} itself",
        )
    classes, images = _class_folders(path, left_out)
    _note_left_out(path, left_out)
    taken = _held_out(images.labels_N, path, classes, validation_fraction)
    sides = (images.take(np.flatnonzero(side)) for side in (~taken, taken))
    return LabelledFolder(classes, *sides)


def _note_left_out(path: Path, left_out: LeftOut) -> None:
    if left_out.total:
        note(f"{named('data.path', path)}: left out: {left_out}; images are read from {', '.join(ENDINGS)}")


def _has_no_use(num_train: int, path: Path) -> ConfigError:
    """Error for a number of training images that would have no effect."""
    return ConfigError(
        "data.train_images",
        num_train,
        f"is for IDX files without a split, and {path} has a split or folders of images",
        "leave it out, or give 0 for this folder",
    )


def _below(path: Path, names: Sequence[str]) -> Path | None:
    """Folder of a split; it must contain folders, which excludes a class of that name ("train", the vehicle)."""
    named = {p.name.lower(): p for p in sorted(path.iterdir()) if p.is_dir()}
    found = (named[name] for name in names if name in named)
    return next((p for p in found if any(inside.is_dir() for inside in p.iterdir())), None)


def _idx_folder(path: Path, found: dict[str | None, Path], num_train: int | None, fraction: float) -> LabelledFolder:
    names = None
    if (path / _CLASSES).is_file():
        try:
            names = decoded((path / _CLASSES).read_bytes()).split("\n")
        except NotTextError as error:
            raise ConfigError(f"{path / _CLASSES}: {error}{remedy(error, '')}") from None
        names = [name.strip() for name in names if name.strip()]
    sides = []
    for wanted in (_TRAIN, _VALIDATION):
        split = next((s for s in found if s in wanted), None)
        sides.append(None if split is None else _read_idx_pair(found[split]))
    training, validation = sides
    if training is None or validation is None:
        only = next(iter(found.values()))
        if len(found) > 1 or next(iter(found)) is not None:
            raise ConfigError(
                "data.path",
                path,
                f"has {only.name} and not both of train-images-idx3-ubyte and test-images-idx3-ubyte",
                "add the other one, or leave the split out of the file's name",
            )
        images = _read_idx_pair(only)
        total = len(images.labels_N)
        count = num_train or total - round(total * fraction)
        if not 0 < count < total:
            raise ConfigError(
                "data.train_images",
                count,
                f"{only} has {total:,} images",
                "leave some on both sides",
            )
        places = np.arange(total)
        training, validation = images.take(places[:count]), images.take(places[count:])
    elif num_train:
        raise _has_no_use(num_train, path)
    largest = int(training.labels_N.max())
    classes = tuple(names or map(str, range(largest + 1)))
    for images in (training, validation):
        if (label := int(images.labels_N.max())) >= len(classes):
            where = f"{path / _CLASSES} names" if names else "the training images have"
            raise ConfigError(
                f"{path}: a label is {label} and {where} {len(classes)} classes, counted from 0; correct the labels"
            )
    return LabelledFolder(classes, training, validation)


def _read_idx_pair(images: Path) -> Images:
    name = images.name.replace("images", "labels").replace("idx3", "idx1")
    options = [images.with_name(n) for n in (name, name.removesuffix(".gz"), f"{name}.gz")]
    labels = next((p for p in options if p.is_file()), None)
    if labels is None:
        raise ConfigError(f"{images}: has no {name} beside it; add the labels")
    pixels_NHW, labels_N = _read_idx(images, 3), _read_idx(labels, 1)
    if len(pixels_NHW) != len(labels_N):
        raise ConfigError(
            f"{labels}: has {len(labels_N):,} labels for {len(pixels_NHW):,} images; they must belong together"
        )
    digest = hashlib.sha256(pixels_NHW.tobytes())
    digest.update(f"{pixels_NHW.shape}".encode() + labels_N.tobytes())
    return Images(
        labels_N.astype(np.int64),
        lambda i: pixels_NHW[i],
        lambda i: f"{images}, image {i}",
        digest.hexdigest(),
    )


def _read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Array of an IDX file: two zero bytes, type, number of dimensions, their sizes (big-endian), values."""
    try:
        raw = path.read_bytes()
        if path.suffix == ".gz":
            raw = gzip.decompress(raw)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: is damaged ({error}); fetch it again") from None
    start = 4 + 4 * dimensions
    if len(raw) < start or raw[:4] != bytes((0, 0, _UNSIGNED_BYTE, dimensions)):
        raise ConfigError(f"{path}: is no IDX file of bytes in {dimensions} dimensions; check how it was written")
    shape = struct.unpack(f">{dimensions}I", raw[4:start])
    if len(raw) - start != (size := int(np.prod(shape))) or not size:
        raise ConfigError(f"{path}: has {len(raw) - start:,} values and promises {size:,}; fetch it again")
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def _class_folders(
    path: Path, left_out: LeftOut, classes: Sequence[str] | None = None
) -> tuple[tuple[str, ...], Images]:
    """Classes and images of class folders, sorted by class, then by name; hidden files are skipped.

    Args:
        left_out: receives the files that are no images.
        classes: known classes, some of which may have no folder here; None: the names of the folders.
    """
    found = tuple(sorted(p.name for p in path.iterdir() if p.is_dir() and p.name[0] != "."))
    if not found:
        raise ConfigError(
            "data.path",
            path,
            "has neither folders of images, one per class, nor IDX files",
            "check the path",
        )
    classes = found if classes is None else tuple(classes)
    if unknown := sorted(set(found) - set(classes)):
        raise ConfigError(
            f"{path / unknown[0]}: is no class that there is to learn; use the names of the training folders"
        )
    files: list[Path] = []
    labels: list[int] = []
    digest = hashlib.sha256()
    for label, name in enumerate(classes):
        inside = _images_below(path / name, left_out)
        if not inside and name in found:
            raise ConfigError(f"{path / name}: has no image ({', '.join(ENDINGS)}); add some, or remove the folder")
        files += inside
        labels += [label] * len(inside)
        for file in inside:
            digest.update(os.fsencode(f"{file.relative_to(path)} {file.stat().st_size}\n"))
    images = Images(
        np.array(labels),
        lambda i: read_image(files[i]),
        lambda i: str(files[i]),
        digest.hexdigest(),
    )
    return classes, images


def _images_below(folder: Path, left_out: LeftOut) -> list[Path]:
    """Image files of a folder and its subfolders, without hidden files, which macOS and notebooks create."""
    images = []
    for path in sorted(folder.glob("**/*")):
        if any(name[0] == "." for name in path.relative_to(folder).parts):
            continue
        if path.suffix.lower() in ENDINGS:
            images.append(path)
        elif path.is_file():
            reason = f"files end in {path.suffix.lower()}" if path.suffix else "files have no ending"
            left_out.add(reason, path.relative_to(folder.parent).as_posix())
    return images


def _held_out(labels_N: np.ndarray, path: Path, classes: Sequence[str], fraction: float) -> Any:
    """Mask (N,) bool of validation images, drawn from each class by its name and size only."""
    taken = np.zeros(len(labels_N), dtype=bool)
    for label, name in enumerate(classes):
        places = np.flatnonzero(labels_N == label)
        count = round(fraction * len(places))
        if count in (0, len(places)):
            count = 1
        if len(places) < 2:
            raise ConfigError(
                f"{path / name}: has {len(places)} image, and one is needed on each side of the split; add some"
            )
        digest = hashlib.blake2b(os.fsencode(name), digest_size=8).digest()
        seed = int.from_bytes(digest, "little")
        order = np.argsort(np.random.Philox(key=seed).random_raw(len(places)), kind="stable")
        taken[places[order[:count]]] = True
    return taken


def read_image_or_idx(name: str) -> np.ndarray:
    """Pixels of an image file, or for FILE@N of the N-th image of an IDX file; see `read_image`."""
    path, at, number = name.rpartition("@")
    if not at or not number.isdecimal() or Path(name).exists():
        return read_image(name)
    file = expanded(path)
    if not file.is_file():
        raise ImageError(f"{path}: is not there; check the path")
    images = _read_idx(file, 3)
    if int(number) >= len(images):
        raise ImageError(f"{name}: the file has {len(images):,} images, counted from 0; use a smaller number")
    found: np.ndarray = images[int(number)]
    return found


def read_image(path: str | Path) -> np.ndarray:
    """Pixels of an image file as uint8, (H, W) if it is grey, else (H, W, 3).

    Transparent pixels become black, and the Exif orientation is applied.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError:
        raise ConfigError(f"{path}: reading image files needs Pillow; install it with: pip install pillow") from None
    file = expanded(path)
    if not file.exists():
        raise ImageError(f"{path}: is not there; check the path")
    if not file.is_file():
        raise ImageError(f"{path}: is no regular file; name an image")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(file) as image:
                ImageOps.exif_transpose(image, in_place=True)
                return _pixels(image, path)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ImageError(f"{path}: has more than {Image.MAX_IMAGE_PIXELS:,} pixels; make it smaller") from None
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError, EOFError) as error:
        words = str(error).replace(str(file), "it")
        raise ImageError(f"{path}: is no image that can be read ({words}); replace or remove it") from None


def _pixels(image: Any, path: str | Path) -> np.ndarray:
    """Pixels of an open Pillow image, as `read_image` returns them."""
    from PIL import Image

    if image.mode in ("1", "L"):
        return np.array(image.convert("L"))
    if image.mode in ("I", "F", "I;16", "I;16B", "I;16L"):
        raise ImageError(f"{path}: has pixels of mode {image.mode}; convert it to 8 bits per channel")
    if image.mode in ("P", "LA", "PA", "RGBA", "La", "RGBa"):
        layer = image.convert("RGBA")
        below = Image.new("RGBA", layer.size, (0, 0, 0, 255))
        below.alpha_composite(layer)
        return np.array(below.convert("RGB"))
    return np.array(image.convert("RGB"))
