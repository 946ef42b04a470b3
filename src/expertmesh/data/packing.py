"""Packing of sequences into rows with little padding."""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def packed(lengths: Sequence[int], capacity: int, order: Sequence[int]) -> list[list[int]]:
    """Pack sequences into rows: longest first, each into the row with the least sufficient room (best fit decreasing).

    Args:
        lengths: tokens of each sequence, at most `capacity`.
        order: indices of all sequences; among equally long ones the earlier here comes first.

    Returns:
        Indices of the sequences of every row. All but one row are more than half full.
    """
    rows: list[list[int]] = []
    open_: dict[int, list[int]] = {}  # rows by the room that they have
    rooms: list[int] = []  # its keys, rising
    longest_first = np.array(order)[np.argsort(-np.array(lengths)[order], kind="stable")]
    for sequence in map(int, longest_first):
        length = int(lengths[sequence])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, room = len(rows), capacity
            rows.append([])
        else:
            room = rooms[place]
            row = open_[room].pop()
            if not open_[room]:
                del open_[room], rooms[place]
        rows[row].append(sequence)
        left = room - length
        if left not in open_:
            open_[left] = []
            insort(rooms, left)
        open_[left].append(row)
    return rows
