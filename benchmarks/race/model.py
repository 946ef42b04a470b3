"""What each kernel of a step should take: operations, bytes, and microseconds, predicted without torch.

A prediction is read from `predictions.json` where someone wrote one for the shape and kernel, with its reason; elsewhere it is
computed from tiles, rates and bandwidth (`Chip`), the same for all shapes.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.race.shapes import BYTES, RaceShape

PREDICTIONS = Path(__file__).with_name("predictions.json")
FORWARD = ("router", "maps", "up", "down", "combine")
BACKWARD = (
    "hidden_grad",
    "input_grad",
    "input_combine",
    "w_out_grad",
    "w_in_grad",
    "router_grad",
)
KERNELS = (*FORWARD, *BACKWARD)
"""In the order in which a step runs them; `router` is the product, the choice and its weights, `maps` the row orders."""


@dataclass(frozen=True)
class Chip:
    """Rates that the model of a kernel's time rests on, of a whole H200 with plain Triton kernels.

    Attributes:
        programs: multiprocessors.
        bytes_per_s: of a large copy, read and written.
        described: operations per s in the inner loop where both operands come by descriptor.
        gathered: where rows are gathered.
        narrow: with 128 x 128 tiles and for weight gradients.
        router: of the router's product.
        launch_s: of a small kernel, however little it does.
    """

    programs: int = 132
    bytes_per_s: float = 4.1e12
    described: float = 600e12
    gathered: float = 500e12
    narrow: float = 430e12
    router: float = 45e12
    launch_s: float = 5e-6


@dataclass(frozen=True)
class Work:
    """What a kernel does: floating-point operations, and bytes moved at least."""

    flops: int
    num_bytes: int


@dataclass(frozen=True)
class Prediction:
    """Microseconds, and where they come from."""

    microseconds: float
    source: str


def work(shape: RaceShape, kernel: str) -> Work:
    """Operations and bytes of one kernel; gathered rows count once per token, as if the L2 held the other reads.

    Args:
        shape: sizes.
        kernel: one of KERNELS.

    Raises:
        KeyError: there is no such kernel.
    """
    T, D, F, E = shape.num_tokens, shape.dim, shape.hidden_dim, shape.num_experts
    K, G, N = shape.top_k, shape.num_branches, shape.num_rows
    wide, narrow = 2 * N * D * G * F, 2 * N * D * F
    h, a, y, w_in, w_out = N * G * F, N * F, N * D, E * G * F * D, E * D * F
    moved = {
        "up": (wide, T * D + w_in + h + a),
        "down": (narrow, a + w_out + y),
        "combine": (y, y + T * D),
        "hidden_grad": (narrow, T * D + w_out + h + a + h),
        "input_grad": (wide, h + w_in + y),
        "input_combine": (y, y + T * D),
        "w_out_grad": (narrow, T * D + a + w_out),
        "w_in_grad": (wide, T * D + h + w_in),
    }
    found = {name: Work(flops, BYTES * elements) for name, (flops, elements) in moved.items()}
    # the router's logits, scores and weight are FP32, its maps int32
    found["router"] = Work(2 * T * E * D, BYTES * T * D + 4 * (E * D + 3 * T * E + 3 * T * K))
    found["maps"] = Work(0, 8 * 2 * N + 4 * 3 * N)
    router_grad = BYTES * 3 * T * D + 4 * (2 * E * D + 3 * T * E + 3 * T * K)
    found["router_grad"] = Work(4 * T * E * D, router_grad)
    return found[kernel]


def modelled_s(shape: RaceShape, kernel: str, chip: Chip | None = None) -> float:
    """Seconds by the model: waves of tiles at a rate, with what a tile does not overlap, but no less than its bytes take."""
    chip = chip or Chip()
    D, F, E, G, N = (
        shape.dim,
        shape.hidden_dim,
        shape.num_experts,
        shape.num_branches,
        shape.num_rows,
    )
    by_bytes_s = work(shape, kernel).num_bytes / chip.bytes_per_s + chip.launch_s
    if kernel in ("router", "router_grad"):
        return by_bytes_s + work(shape, kernel).flops / chip.router
    if kernel in ("maps", "combine", "input_combine"):
        return by_bytes_s
    # half a tile of padding per expert
    row_tiles = math.ceil(N / 128) + E / 2
    rows = N / E
    tiles, length, rate, alone_s = {
        "up": (row_tiles * math.ceil(G * F / 256), D, chip.gathered, 3e-6),
        "down": (row_tiles * math.ceil(D / 256), F, chip.described, 2e-6),
        "hidden_grad": (row_tiles * math.ceil(F / 128), D, chip.narrow, 4e-6),
        "input_grad": (row_tiles * math.ceil(D / 256), G * F, chip.described, 2e-6),
        "w_out_grad": (E * math.ceil(D / 128) * math.ceil(F / 256), rows, chip.narrow, 2.7e-6),
        "w_in_grad": (E * math.ceil(G * F / 128) * math.ceil(D / 256), rows, chip.narrow, 2.7e-6),
    }[kernel]
    columns = 128 if kernel == "hidden_grad" else 256
    tile_s = 2 * 128 * columns * length / (rate / chip.programs) + alone_s
    return max(math.ceil(tiles / chip.programs) * tile_s, by_bytes_s)


@cache
def written(path: Path = PREDICTIONS) -> dict[str, Any]:
    """The predictions that someone wrote: `{"source": why, "microseconds": {shape: {kernel: number}}}`.

    Raises:
        ValueError: the file names a kernel that there is not, or a time that is none.
    """
    found = json.loads(path.read_text())
    for shape, by_kernel in found["microseconds"].items():
        for kernel, microseconds in by_kernel.items():
            if kernel not in KERNELS or not microseconds > 0:
                raise ValueError(
                    f"{path.name}: {shape}: {kernel} takes {microseconds} us; known are {', '.join(KERNELS)}, in us > 0"
                )
    return found


def predicted(shape: RaceShape, kernel: str, path: Path = PREDICTIONS) -> Prediction:
    """The written prediction of a kernel at a shape, or the model's."""
    given = written(path)
    microseconds = given["microseconds"].get(shape.name, {}).get(kernel)
    if microseconds is not None:
        return Prediction(float(microseconds), given["source"])
    return Prediction(modelled_s(shape, kernel) * 1e6, "model")
