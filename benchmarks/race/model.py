"""What each kernel of a step should take: operations, bytes, and microseconds, predicted without torch.

A prediction is read from `predictions.json` where someone wrote one for the shape and kernel, with its reason;
elsewhere it is computed from tiles, rates and bandwidth (`Chip`), the same for all shapes.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.race.shapes import BYTES, SHAPES, RaceShape

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
"""In the order in which a step runs them; `router` is the product, the choice and its weights, `maps` the row
orders."""


@dataclass(frozen=True)
class Chip:
    """Rates that the model of a kernel's time rests on, of a whole H200 with plain Triton kernels.

    Attributes:
        programs: multiprocessors.
        bytes_per_s: of a large copy, read and written.
        described: operations per s in the inner loop where both operands come by descriptor.
        gathered: where rows are gathered.
        narrow: with 128 x 128 tiles and for weight gradients.
        router: of the router's products of BF16 parts, three for one.
        launch_s: of a small kernel, however little it does.
    """

    programs: int = 132
    bytes_per_s: float = 4.1e12
    described: float = 600e12
    gathered: float = 500e12
    narrow: float = 430e12
    router: float = 300e12
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


@dataclass(frozen=True)
class Cut:
    """How a GEMM is cut, which is what its time is modelled from.

    Attributes:
        tiles: of all experts, padding included: `_PADDING` per expert.
        columns: of a tile of 128 rows.
        length: products that are added per number.
        rate: operations per s of the whole chip in the inner loop.
        alone_s: of a tile, what nothing overlaps: the pipeline's first loads, and of the epilogue what no other tile's
            work hides.
    """

    tiles: float
    columns: int
    length: float
    rate: float
    alone_s: float

    def waves(self, chip: Chip) -> int:
        """Tiles that a program takes one after another."""
        return math.ceil(self.tiles / chip.programs)

    def seconds(self, chip: Chip) -> float:
        """All waves: each is as long as a tile, however few programs have one in the last."""
        inner_s = 2 * _BLOCK_M * self.columns * self.length / (self.rate / chip.programs)
        return self.waves(chip) * (inner_s + self.alone_s)


_BLOCK_M = 128
_COLUMNS, _NARROW_COLUMNS = 256, 128
_PADDING = 0.5 - 0.5 * (1 - 0.55)
"""Tiles per expert that padding costs: half of the last one, but half of the last ones are multiplied at half height,
for 0.55 of the time."""
_LAUNCHES = {"router": 4, "maps": 3, "router_grad": 6}
"""Small kernels in a row: products, their preparation, the choice; the counting sort; sums over pieces of the
tokens."""
_ROUTER_PRODUCTS = {"router": 3, "router_grad": 6}
"""Products of BF16 parts: three for the logits; three each for the gradients of the tokens and of the weight."""


def cut(shape: RaceShape, kernel: str, chip: Chip) -> Cut | None:
    """How the default table cuts a GEMM at a shape with many rows; None for what is no GEMM of the experts."""
    D, F, E, G, N = (
        shape.dim,
        shape.hidden_dim,
        shape.num_experts,
        shape.num_branches,
        shape.num_rows,
    )
    row_tiles = math.ceil(N / _BLOCK_M) + E * _PADDING
    rows = N / E

    def columns(width: int, block: int = _COLUMNS) -> int:
        return math.ceil(width / block)

    weights = (E * columns(D, _BLOCK_M) * columns(F), E * columns(G * F, _BLOCK_M) * columns(D))
    wide, narrow = _COLUMNS, _NARROW_COLUMNS
    return {
        "up": Cut(row_tiles * columns(G * F), wide, D, chip.gathered, _UP_S),
        "down": Cut(row_tiles * columns(D), wide, F, chip.described, _ROWS_S),
        "hidden_grad": Cut(row_tiles * columns(F, narrow), narrow, D, chip.narrow, _HIDDEN_GRAD_S),
        "input_grad": Cut(row_tiles * columns(D), wide, G * F, chip.described, _ROWS_S),
        "w_out_grad": Cut(weights[0], wide, rows, chip.narrow, _WEIGHT_GRAD_S),
        "w_in_grad": Cut(weights[1], wide, rows, chip.narrow, _WEIGHT_GRAD_S),
    }.get(kernel)


_UP_S, _ROWS_S, _HIDDEN_GRAD_S, _WEIGHT_GRAD_S = 2.2e-6, 1.2e-6, 2.8e-6, 1.2e-6
"""What a tile takes alone: 0.8 us until the first loads are there, the epilogue's arithmetic (`up` 1, `hidden_grad`
1.2, with H read from the L2 0.4 more), the result's way into shared memory 0.4. The copy engine takes it on while the
next tile is multiplied; weights' tiles are written by the program itself, from registers that are as many."""


def modelled_s(shape: RaceShape, kernel: str, chip: Chip | None = None) -> float:
    """Seconds by the model: waves of tiles at a rate, with what a tile does not overlap, but no less than its bytes
    take."""
    chip = chip or Chip()
    found = work(shape, kernel)
    by_bytes_s = found.num_bytes / chip.bytes_per_s + chip.launch_s * _LAUNCHES.get(kernel, 1)
    gemm = cut(shape, kernel, chip)
    if gemm is not None:
        return max(gemm.seconds(chip), by_bytes_s)
    if kernel in _ROUTER_PRODUCTS:
        single = 2 * shape.num_tokens * shape.num_experts * shape.dim
        return by_bytes_s + single * _ROUTER_PRODUCTS[kernel] / chip.router
    return by_bytes_s


def lines(shape: RaceShape, measured_us: dict[str, float]) -> list[dict[str, str]]:
    """A shape's predictions as rows of a table: costs, waves, microseconds, and those measured where there are some.

    Args:
        shape: sizes.
        measured_us: microseconds by kernel.
    """
    chip, rows = Chip(), []
    for kernel in KERNELS:
        found, gemm = work(shape, kernel), cut(shape, kernel, chip)
        expected = predicted(shape, kernel).microseconds
        seen = measured_us.get(kernel)
        rows.append(
            {
                "kernel": kernel,
                "GFLOP": f"{found.flops / 1e9:.0f}",
                "MB": f"{found.num_bytes / 1e6:.0f}",
                "tiles": "" if gemm is None else f"{gemm.tiles:.0f}",
                "waves": "" if gemm is None else str(gemm.waves(chip)),
                "predicted us": f"{expected:.0f}",
                "measured us": "" if seen is None else f"{seen:.0f}",
                "measured / predicted": "" if seen is None else f"{seen / expected:.2f}",
            }
        )
    return rows


def freeze(path: Path = PREDICTIONS) -> None:
    """Write down what the model says now for every shape, so that later changes of it do not touch what was
    predicted."""
    source = json.loads(path.read_text())["source"] if path.exists() else "model"
    found = {shape.name: {kernel: round(modelled_s(shape, kernel) * 1e6, 1) for kernel in KERNELS} for shape in SHAPES}
    path.write_text(json.dumps({"source": source, "microseconds": found}, indent=1) + "\n")


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
