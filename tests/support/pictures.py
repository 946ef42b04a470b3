"""Small labelled images: a class is the direction of stripes."""

import gzip
import struct

import numpy as np

SIDE = 16


def stripes(count, *, classes=4, seed=0):
    """(count, 16, 16) uint8 noisy images and their (count,) kinds: rows, columns, a chequered board, grey."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    images = rng.integers(0, 40, (count, SIDE, SIDE), dtype=np.uint8)
    y, x = np.indices((SIDE, SIDE))
    bright = np.stack((y % 2, x % 2, (x + y) % 2, np.full((SIDE, SIDE), 0.5)))
    images += (bright[labels] * 150).astype(np.uint8)
    return images, labels.astype(np.uint8)


def write_idx(path, array):
    """An IDX file of bytes, packed where the name ends in .gz."""
    raw = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape)
    raw += array.tobytes()
    path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def write_folder(folder, images, labels, *, prefix=""):
    """Images and labels as IDX files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_idx(folder / f"{prefix}images-idx3-ubyte.gz", images)
    write_idx(folder / f"{prefix}labels-idx1-ubyte", labels)
    return folder
