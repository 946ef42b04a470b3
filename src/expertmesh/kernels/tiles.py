"""Tile sizes of the experts' GEMMs: a table in host code, read by shapes and architecture, never by values.

The tables here have not run on a GPU. An entry of `measured_tiles.json` for an architecture and shape overrides
them (`measured.py`). The `source` of a tile is its origin: "published" tiles are from vLLM's tuned tables for an H200
and BF16 at this number of rows per expert (E = 128, F = 768). "untuned default" tiles were chosen by hand from padding
waste, the accumulator's registers and shared memory, and are only checked to build.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels import measured, tile_tables

PUBLISHED = "published"
UNTUNED = "untuned default"

SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_103": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
    "gfx950": 160 * 1024,
}
"""Shared memory (LDS) available to one program, in bytes."""
_LARGE = ("sm_90", "sm_100", "sm_103")
_FEWEST_SHARED_BYTES = 64 * 1024
INVARIANT_ROWS = 64
"""Rows per expert for which batch-invariant mode chooses tiles: between decoding and long prompts."""
PIECE_ROWS = 512
"""Minimum number of rows for which it pays to give part of an expert's weight gradient to another program."""
UP_CHUNK = 64
"""Hidden units held at once in the epilogue of the first GEMM."""
HIDDEN_GRAD_CHUNK = 32
"""Elements of a row of H held at once in the activation's backward; more do not fit the registers of every GPU."""
_HOPPER_CHUNK = 64
"""`HIDDEN_GRAD_CHUNK` for BF16 and FP16 on Hopper: half as many waits for the buffers through which dH is stored."""
_DESCRIBED_BYTES = 16
"""Alignment of base address and strides that tensor descriptors need, in bytes."""
SHARED_BYTES_KEPT = 1024
"""Bytes of shared memory for pipeline barriers and reductions, beside `shared_bytes`."""
_FLATTENED_BYTES = 128
"""Bytes of further barriers if the loops over tiles and steps are flattened; 24 bytes were seen."""
_SHARED_BYTES_RESERVED = 1024  # reserved in each program by the driver
_KEPT_PLANS = 1024


@dataclass(frozen=True)
class Tile:
    """Tile sizes and launch parameters of one GEMM."""

    block_m: int  # rows of the result per tile (routed rows; for weight gradients rows of the weight)
    block_n: int  # columns per tile; for the first GEMM columns of F, so gated experts compute twice as many
    block_k: int  # length of one step along the sum
    num_warps: int  # warps per program
    num_stages: int  # depth of the software pipeline
    group_m: int = 8  # row tiles processed before the next column tile, so that they share the weights in L2
    source: str = UNTUNED  # origin of the entry, `PUBLISHED` or `UNTUNED` or a measurement's
    programs: int = 1  # programs per multiprocessor; small tiles leave room for several
    # if rows are read by descriptors, results are stored by descriptors too, while the next tile begins
    ragged: bool = False
    tails: bool = False  # multiply a tile with at most half its rows at half height
    flatten: bool = False  # flatten the loops over tiles and along the sum into one, pipelined across tiles
    fetch: bool = False  # prefetch H into L2 before the sum, for the epilogue of `hidden_grad` (NVIDIA)
    # hidden units that the epilogues of `up` and `hidden_grad` hold at once; None: `UP_CHUNK`, `HIDDEN_GRAD_CHUNK`
    chunk: int | None = None


@dataclass(frozen=True)
class LaunchConfig:
    """Tiles and options of all launches of the experts."""

    up: Tile  # x W_in and the activation. The four GEMMs over routed rows share its block_m.
    down: Tile  # A' W_out
    hidden_grad: Tile  # dO W_out and the gradient of the activation
    input_grad: Tile  # dH W_in
    w_in_grad: Tile  # dH^T x
    w_out_grad: Tile  # dO^T A'
    tma: bool  # load weights and sorted rows through tensor descriptors (Hopper)
    precision: str  # precision of FP32 products, "ieee" or "tf32"; no effect for other dtypes
    num_programs: int  # number of multiprocessors, each of which runs a tile's `programs`
    interpreted: bool  # whether the tensors are on the CPU
    sharing: int = 1  # number of programs among which one expert's weight gradient may be split, over all its tiles
    piece_rows: int = PIECE_ROWS  # minimum number of rows of a piece of such a split

    @property
    def block_m(self) -> int:
        """Rows per tile of the GEMMs over routed rows, which share one tile table."""
        return self.up.block_m


def is_interleaved(w_in_EGFD: Tensor) -> bool:
    """Whether gate and up rows alternate in memory: w_in is `stored.view(E, F, 2, D).transpose(1, 2)`."""
    if w_in_EGFD.shape[1] != 2 or w_in_EGFD.is_contiguous():
        return False
    return w_in_EGFD.transpose(1, 2).is_contiguous()


def architecture(device: torch.device) -> str:
    """Return the GPU's name as in the tables ("sm_90", "gfx942", ...); "interpreter" for the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def choose_config(
    device: torch.device,  # the device of the tensors
    dtype: torch.dtype,  # float32, bfloat16 or float16
    *,
    num_rows: int,  # R, the static bound on the number of routed rows
    num_experts: int,  # E
    dim: int,  # D
    hidden_dim: int,  # F
    num_branches: int,  # G
    batch_invariant: bool = False,  # choose the same tiles for every num_rows, so that no sum changes its order
) -> LaunchConfig:
    """Choose the tiles for tensors on a device; depends on shapes only and does not synchronise.

    Returns:
        The config. FP32 products use TF32 if PyTorch's do: `torch.backends.cuda.matmul.fp32_precision = "tf32"`, or an
        equivalent setting (`allow_tf32 = True`, `torch.set_float32_matmul_precision("high")`); else IEEE.
    """
    arch = architecture(device)
    # the newest of three switches: it follows the older two, which raise after it was set
    allow_tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return config_for(
        arch,
        dtype,
        rows_per_expert=INVARIANT_ROWS if batch_invariant else num_rows / max(num_experts, 1),
        dim=dim,
        hidden_dim=hidden_dim,
        num_branches=num_branches,
        precision="tf32" if allow_tf32 and dtype == torch.float32 else "ieee",
        num_programs=multiprocessors(device),
        table=tile_tables.selected(),
    )


def config_for(
    arch: str,
    dtype: torch.dtype,
    *,
    rows_per_expert: float,
    dim: int,
    hidden_dim: int,
    num_branches: int,
    precision: str = "ieee",
    num_programs: int = 132,
    table: str = tile_tables.DEFAULT,
) -> LaunchConfig:
    """Choose the tiles for a named architecture; `choose_config` calls it for a device."""
    config = _by_table(
        arch,
        dtype,
        rows_per_expert,
        dim,
        hidden_dim,
        num_branches,
        precision,
        num_programs,
        table,
    )
    if table != tile_tables.DEFAULT:
        return config
    found = measured.nearest(
        arch,
        str(dtype).removeprefix("torch."),
        rows_per_expert=rows_per_expert,
        dim=dim,
        hidden_dim=hidden_dim,
        num_branches=num_branches,
    )
    if found is None:
        return config
    cut: dict[str, Any] = {name: Tile(**tile) for name, tile in found.tiles.items()}
    return replace(config, **cut)


@lru_cache(maxsize=_KEPT_PLANS)
def _by_table(
    arch: str,
    dtype: torch.dtype,
    rows_per_expert: float,
    dim: int,
    hidden_dim: int,
    num_branches: int,
    precision: str,
    num_programs: int,
    table: str,
) -> LaunchConfig:
    """Choose by the table; cached, because every call of the experts asks up to three times."""
    itemsize = dtype.itemsize
    # Descriptors need strides that are multiples of 16 bytes; other shapes use pointers.
    widths = (dim * itemsize, hidden_dim * itemsize)
    aligned = all(width % _DESCRIBED_BYTES == 0 for width in widths)
    rows = _rows_tile(arch, itemsize, rows_per_expert, precision)
    weight = _weight_tile(arch, itemsize, precision)
    singly = bool(dim % 16 or hidden_dim % 16)
    if singly and arch != "interpreter":
        rows, weight = _for_single_elements(rows), _for_single_elements(weight)
    one_branch = replace(rows, block_n=_fit(rows.block_n, dim))
    up = replace(rows, block_n=_fit(rows.block_n // num_branches, hidden_dim))
    # the epilogue holds the accumulator, H and both gradients at once, so half the columns
    columns = min(rows.block_n, tile_tables.hidden_columns(arch, table))
    hidden = replace(rows, block_n=_fit(columns, hidden_dim), source=UNTUNED)
    if arch == "sm_90":
        hidden = replace(hidden, fetch=True, chunk=None if singly or itemsize > 2 else _HOPPER_CHUNK)
    w_in = replace(weight, block_m=_fit(weight.block_m, num_branches * hidden_dim))
    w_in = replace(w_in, block_n=_fit(weight.block_n, dim))
    w_out = replace(weight, block_m=_fit(weight.block_m, dim))
    w_out = replace(w_out, block_n=_fit(weight.block_n, hidden_dim))

    tma = arch == "sm_90" and aligned

    def fitted(gemm: str, tile: Tile) -> Tile:
        sizes = {"block_m": tile.block_m, "block_n": tile.block_n, "num_branches": num_branches}
        tile = replace(tile, **tile_tables.changes(arch, table, gemm, **sizes))
        return _fit_stages(gemm, tile, arch, itemsize, num_branches, tma=tma)

    return LaunchConfig(
        up=fitted("up", up),
        down=fitted("down", one_branch),
        hidden_grad=fitted("hidden_grad", hidden),
        input_grad=fitted("input_grad", one_branch),
        w_in_grad=fitted("w_in_grad", w_in),
        w_out_grad=fitted("w_out_grad", w_out),
        tma=tma,
        precision=precision,
        num_programs=num_programs,
        interpreted=arch == "interpreter",
        sharing=num_programs,
    )


def described(config: LaunchConfig, *tensors: Tensor) -> LaunchConfig:
    """Return the config, without descriptors if a tensor's address or strides are not multiples of 16 bytes.

    New tensors are aligned. A shard of a flat buffer, or a view, may not be: one row of a wider matrix is contiguous
    whatever its stride. Reads an address on the host; does not synchronise.
    """
    if config.tma and not all(map(_is_described, tensors)):
        return replace(config, tma=False)
    return config


def _is_described(tensor: Tensor) -> bool:
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return not any(place % _DESCRIBED_BYTES for place in (tensor.data_ptr(), *strides))


def _rows_tile(arch: str, itemsize: int, rows_per_expert: float, precision: str) -> Tile:
    """Choose the tile of a GEMM over routed rows: padding wastes up to half a tile per expert, so few rows need low
    tiles."""
    if arch == "interpreter":
        return Tile(32, 64, 64, 4, 1, group_m=2)
    if itemsize == 4 and precision == "ieee" and not arch.startswith("gfx"):
        # without tensor cores a thread holds its whole step of both operands, so steps are short and tiles small
        return Tile(16 if rows_per_expert <= 24 else 64, 64, 16, 8, 3)
    if arch.startswith("gfx"):
        return _rows_tile_amd(itemsize, rows_per_expert)
    if itemsize == 4:
        return _rows_tile_fp32(arch, rows_per_expert)
    if rows_per_expert <= 8:
        return Tile(16, 64, 128, 4, 4, source=PUBLISHED, programs=3 if arch in _LARGE else 2)
    if rows_per_expert <= 24:
        return Tile(32, 128, 128, 4, 3, programs=2)
    if rows_per_expert <= 48:
        # four warps and 72 KiB: a single program would not hide the multiprocessor's latencies
        return Tile(64, 128, 64, 4, 3, source=PUBLISHED, programs=2)
    if arch in _LARGE:
        ragged = arch == "sm_90"
        if rows_per_expert < 256:
            return Tile(64, 256, 64, 8, 4, ragged=ragged)
        return Tile(128, 256, 64, 8, 4, source=PUBLISHED, ragged=ragged, tails=ragged)
    if rows_per_expert < 256:
        return Tile(64, 128, 64, 4, 3, programs=2)
    return Tile(128, 128, 64, 8, 3)


def _rows_tile_fp32(arch: str, rows_per_expert: float) -> Tile:
    if rows_per_expert <= 24:
        return Tile(16, 64, 64, 4, 3, programs=3)
    if rows_per_expert < 256:
        # four warps spill 128 bytes per thread on Blackwell (Triton 3.7.1)
        return Tile(64, 64, 32, 8 if arch.startswith("sm_10") else 4, 3)
    if arch == "sm_90":  # on Blackwell the activation's backward spills 164 bytes per thread (Triton 3.7.1)
        return Tile(128, 128, 32, 8, 3)
    return Tile(64, 128, 32, 8, 3)


def _rows_tile_amd(itemsize: int, rows_per_expert: float) -> Tile:
    block_k = 64 if itemsize == 2 else 32
    if rows_per_expert <= 24:
        return Tile(16, 64, block_k, 4, 2, programs=3)
    if rows_per_expert < 256:
        return Tile(64, 128, block_k, 4, 2)
    return Tile(128, 128, block_k, 8, 2)


def _weight_tile(arch: str, itemsize: int, precision: str) -> Tile:
    """Choose the tile of a weight gradient, whose sum runs over an expert's rows.

    Row indices are loaded before the rows, so the pipeline has one buffer per two stages.
    """
    if arch == "interpreter":
        return Tile(64, 64, 32, 4, 1, group_m=2)
    if arch.startswith("gfx"):
        return Tile(128, 128, 32, 8, 2)
    if itemsize == 4 and precision == "ieee":
        return Tile(64, 64, 16, 8, 5)
    if itemsize == 4:
        return Tile(128, 64, 32, 8, 5)
    if arch == "sm_90":
        return Tile(128, 256, 64, 8, 5)
    if arch in _LARGE:
        # 256 columns spill 96 bytes per thread on Blackwell (Triton 3.7.1)
        return Tile(128, 128, 64, 8, 5)
    return Tile(128, 128, 32, 8, 7)


def _for_single_elements(tile: Tile) -> Tile:
    """Reduce a tile for rows that are no multiple of 16 elements: Triton then loads single elements, through
    registers."""
    return Tile(min(tile.block_m, 64), min(tile.block_n, 128), min(tile.block_k, 32), 8, 2)


def _fit(block: int, size: int) -> int:
    """Block size reduced to a power of two of at least 16 if the matrix is narrower than the block."""
    return max(16, min(block, 1 << max(size - 1, 0).bit_length()))


def shared_bytes(gemm: str, tile: Tile, itemsize: int, num_branches: int, *, tma: bool) -> int:
    """Upper bound on a program's shared memory in bytes: operands of all stages, and buffers of the results."""
    branches = num_branches if gemm == "up" else 1
    step = (tile.block_m + branches * tile.block_n) * tile.block_k
    # row indices of weight gradients are loaded before the rows: one buffer per two stages
    buffers = (tile.num_stages + 1) // 2 if gemm in tile_tables.WEIGHT_GRADS else tile.num_stages
    if gemm in tile_tables.OVER_ROWS and tile.block_m < 64:
        # products of warp groups read shared memory while the next copies arrive, products of warps do not
        buffers -= 1
    results, barriers = 0, 0
    # a flattened loop loads the next tile while results go through shared memory
    if gemm in tile_tables.OVER_ROWS and (tile.flatten or (tile.ragged and tma)):
        results = tile.block_m * _columns_at_once(gemm, tile)
        barriers = _FLATTENED_BYTES * tile.flatten
    return (step * buffers + results) * itemsize + barriers


def _columns_at_once(gemm: str, tile: Tile) -> int:
    """Columns of the result buffers in shared memory: one buffer for H (or dH) and one for A', whatever the
    branches."""
    if gemm == "up":
        return 2 * min(tile.block_n, tile.chunk or UP_CHUNK)
    if gemm == "hidden_grad":  # one more for loaded H if flattened: operands keep their buffers
        return (2 + tile.flatten) * min(tile.block_n, tile.chunk or HIDDEN_GRAD_CHUNK)
    return tile.block_n // 2


def _fit_stages(gemm: str, tile: Tile, arch: str, itemsize: int, num_branches: int, *, tma: bool) -> Tile:
    """Reduce stages, then the step, until a program fits the shared memory."""
    limit = SHARED_BYTES.get(arch, _FEWEST_SHARED_BYTES)
    if arch in _LARGE:  # elsewhere fewer programs at once lose less than fewer stages
        limit = (limit + _SHARED_BYTES_RESERVED) // tile.programs - _SHARED_BYTES_RESERVED
    limit -= SHARED_BYTES_KEPT
    if shared_bytes(gemm, tile, itemsize, num_branches, tma=tma) <= limit:
        return tile
    if tile.num_stages > 2:
        smaller = replace(tile, num_stages=tile.num_stages - 1)
    elif tile.block_k > 16:
        smaller = replace(tile, block_k=tile.block_k // 2)
    else:
        return tile
    return _fit_stages(gemm, smaller, arch, itemsize, num_branches, tma=tma)


def multiprocessors(device: torch.device) -> int:
    """Number of programs that run at once; 3 in the interpreter."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_tile(device: torch.device, *, num_rows: int, num_programs: int) -> Tile:
    """Choose the tile of `split_product`, a step of which holds up to four blocks of operands."""
    arch = architecture(device)
    if arch == "interpreter":
        return Tile(64, 64, 64, 4, 1)
    if arch.startswith("gfx"):
        return Tile(64, 64, 32, 4, 2)
    if arch not in _LARGE:
        return Tile(64, 128, 32, 4, 3)
    is_small = num_rows <= 64 * num_programs
    if arch != "sm_90":  # sums leave tensor memory through shared memory, and four warps spill
        return Tile(64, 128, 64, 8, 3) if is_small else Tile(128, 128, 32, 8, 3)
    return Tile(64, 128, 64, 4, 3) if is_small else Tile(128, 128, 64, 8, 3)
