"""Boxes, parts of tensors as a slice per dimension, and their overlap. Never imports torch."""

from collections.abc import Iterable

Box = tuple[slice, ...]
"""A part of a tensor: a slice with start and stop per dimension."""


def whole_box(shape: Iterable[int]) -> Box:
    """The box of a whole tensor."""
    return tuple(slice(0, n) for n in shape)


def overlap(box: Box, other: Box) -> tuple[Box, Box] | None:
    """Overlap of two boxes of a tensor, counted from the start of each box; None: they do not overlap."""
    starts = [max(a.start, b.start) for a, b in zip(box, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(box, other, strict=True)]
    if any(start >= stop for start, stop in zip(starts, stops, strict=True)):
        return None
    within = [
        tuple(slice(start - at.start, stop - at.start) for start, stop, at in zip(starts, stops, one, strict=True))
        for one in (box, other)
    ]
    return within[0], within[1]
