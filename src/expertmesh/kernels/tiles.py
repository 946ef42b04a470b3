"""Tile sizes of the experts' GEMMs: a table in host code, read by shapes and architecture, never by values.

Nothing here has run on a GPU. Where `measured_tiles.json` has an entry for an architecture and shape, it wins (`measured.py`). An entry says where it comes from: "published" entries are those that vLLM's tuned
tables give for an H200 and BF16 at this number of rows per expert (E = 128, F = 768); "untuned default" entries were
chosen by hand from the padding waste, the accumulator's registers and the shared memory, and only build.
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
"""Shared memory (LDS) that one program may have."""
_LARGE = ("sm_90", "sm_100", "sm_103")
_FEWEST_SHARED_BYTES = 64 * 1024
INVARIANT_ROWS = 64
"""Rows per expert that the tiles of the batch-invariant mode are chosen for: between decoding and long prompts."""
PIECE_ROWS = 512
"""Fewest rows for which it pays to give part of an expert's weight gradient to another program."""
UP_CHUNK = 64
"""Hidden units that the epilogue of the first GEMM holds at once."""
HIDDEN_GRAD_CHUNK = 32
"""Elements of H in a row that the activation's backward holds at once; more do not fit the registers everywhere."""
_HOPPER_CHUNK = 64
"""The same of BF16 and FP16 on Hopper: half as many waits for the buffers by which dH leaves."""
_DESCRIBED_BYTES = 16
"""Alignment of what the copy engine reads: base and strides."""
SHARED_BYTES_KEPT = 1024
"""For barriers of the pipeline, and reductions, beside what `shared_bytes` counts."""
_FLATTENED_BYTES = 128
"""Of further barriers, where the loops over tiles and steps are one: 24 bytes were seen."""
_SHARED_BYTES_RESERVED = 1024  # of each program, by the driver
_KEPT_PLANS = 1024


@dataclass(frozen=True)
class Tile:
    """How one GEMM is cut.

    Attributes:
        block_m: rows of the result per tile (routed rows; for weight gradients rows of the weight).
        block_n: columns per tile; for the first GEMM columns of F, so gated experts compute twice as many.
        block_k: length of one step along the sum.
        num_warps: warps per program.
        num_stages: depth of the software pipeline.
        group_m: row tiles that are walked before the next column tile, so that they share the weights in the L2.
        source: how the entry was found.
        programs: programs per multiprocessor; small tiles leave room for several.
        ragged: where rows are read by descriptors, results are written by them, too, while the next tile begins.
        tails: a tile with at most half its rows is multiplied at half the height.
        flatten: the loop over tiles and the one along the sum are one, pipelined across tiles.
        fetch: H is asked for before the sum, so that the epilogue of `hidden_grad` finds it in the L2 (NVIDIA).
        chunk: hidden units that the epilogues of `up` and `hidden_grad` hold at once; None: `UP_CHUNK`, `HIDDEN_GRAD_CHUNK`.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    source: str = UNTUNED
    programs: int = 1
    ragged: bool = False
    tails: bool = False
    flatten: bool = False
    fetch: bool = False
    chunk: int | None = None


@dataclass(frozen=True)
class LaunchConfig:
    """Everything about a launch of the experts that is not data.

    Attributes:
        up: x W_in and the activation. Its block_m is that of the four GEMMs over routed rows.
        down: A' W_out.
        hidden_grad: dO W_out and the gradient of the activation.
        input_grad: dH W_in.
        w_in_grad: dH^T x.
        w_out_grad: dO^T A'.
        tma: load weights and rows that lie in order through tensor descriptors (Hopper).
        precision: of FP32 products, "ieee" or "tf32"; without effect for other types.
        num_programs: multiprocessors, each of which gets a tile's `programs`.
        interpreted: the tensors are on the CPU.
        sharing: programs among which the weight gradient of one expert may be split, all its tiles together.
        piece_rows: fewest rows of a part of such a split.
    """

    up: Tile
    down: Tile
    hidden_grad: Tile
    input_grad: Tile
    w_in_grad: Tile
    w_out_grad: Tile
    tma: bool
    precision: str
    num_programs: int
    interpreted: bool
    sharing: int = 1
    piece_rows: int = PIECE_ROWS

    @property
    def block_m(self) -> int:
        """Rows per tile of the GEMMs over routed rows: they share one tile table."""
        return self.up.block_m


def is_interleaved(w_in_EGFD: Tensor) -> bool:
    """Whether gate and up rows alternate in memory: w_in is `stored.view(E, F, 2, D).transpose(1, 2)`."""
    if w_in_EGFD.shape[1] != 2 or w_in_EGFD.is_contiguous():
        return False
    return w_in_EGFD.transpose(1, 2).is_contiguous()


def architecture(device: torch.device) -> str:
    """Name the GPU as in the table ("sm_90", "gfx942", ...); "interpreter" for the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def choose_config(
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_rows: int,
    num_experts: int,
    dim: int,
    hidden_dim: int,
    num_branches: int,
    batch_invariant: bool = False,
) -> LaunchConfig:
    """Choose the tiles for tensors on a device; depends on shapes only and does not synchronise.

    Args:
        device: where the tensors are.
        dtype: float32, bfloat16 or float16.
        num_rows: R, the static bound on routed rows.
        num_experts: E.
        dim: D.
        hidden_dim: F.
        num_branches: G.
        batch_invariant: the same tiles whatever num_rows, so that no sum changes its order.

    Returns:
        The config. FP32 products are TF32 where PyTorch's are: `torch.backends.cuda.matmul.fp32_precision = "tf32"`, or
        what sets it too (`allow_tf32 = True`, `torch.set_float32_matmul_precision("high")`); else IEEE.
    """
    arch = architecture(device)
    # the newest of three switches: it follows the older two, which raise once it was set
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
    """Choose the tiles for a named architecture; what `choose_config` does once it knows the device.

    Raises:
        ConfigError: the architecture has no table of that name.
    """
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
    """What the table says; kept, because every call of the experts asks up to three times."""
    itemsize = dtype.itemsize
    # Descriptors need strides of a multiple of 16 bytes; other shapes take the path with pointers.
    widths = (dim * itemsize, hidden_dim * itemsize)
    aligned = all(width % _DESCRIBED_BYTES == 0 for width in widths)
    rows = _rows_tile(arch, itemsize, rows_per_expert, precision)
    weight = _weight_tile(arch, itemsize, precision)
    singly = bool(dim % 16 or hidden_dim % 16)
    if singly and arch != "interpreter":
        rows, weight = _for_single_elements(rows), _for_single_elements(weight)
    one_branch = replace(rows, block_n=_fit(rows.block_n, dim))
    up = replace(rows, block_n=_fit(rows.block_n // num_branches, hidden_dim))
    # the epilogue holds the accumulator, H and both gradients at once: half the columns
    columns = min(rows.block_n, tile_tables.hidden_columns(arch, table))
    hidden = replace(rows, block_n=_fit(columns, hidden_dim), source=UNTUNED)
    if arch == "sm_90":
        hidden = replace(
            hidden, fetch=True, chunk=None if singly or itemsize > 2 else _HOPPER_CHUNK
        )
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
    """The config, without descriptors where one of these tensors does not begin, or go on, at a multiple of 16 bytes.

    Fresh tensors do; a shard of a flat buffer, or a view, need not: one row of a wider matrix is contiguous whatever its stride.
    Reads an address on the host; does not synchronise.
    """
    if config.tma and not all(map(_is_described, tensors)):
        return replace(config, tma=False)
    return config


def _is_described(tensor: Tensor) -> bool:
    strides = (stride * tensor.itemsize for stride in tensor.stride()[:-1])
    return not any(place % _DESCRIBED_BYTES for place in (tensor.data_ptr(), *strides))


def _rows_tile(arch: str, itemsize: int, rows_per_expert: float, precision: str) -> Tile:
    """The tile of a GEMM over routed rows: most waste is half a tile per expert, so few rows want low tiles."""
    if arch == "interpreter":
        return Tile(32, 64, 64, 4, 1, group_m=2)
    if itemsize == 4 and precision == "ieee" and not arch.startswith("gfx"):
        # no tensor cores: a thread holds its whole step of both operands, so steps are short and tiles small
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
        # four warps and 72 KiB: one alone would leave the multiprocessor's latencies uncovered
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
    if (
        arch == "sm_90"
    ):  # on Blackwell the activation's backward spills 164 bytes per thread (Triton 3.7.1)
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
    """The tile of a weight's gradient: the sum runs over an expert's rows.

    Rows are loaded by indices that are loaded themselves, so the pipeline has one buffer per two stages.
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
    """A tile for rows that are no multiple of 16 elements: Triton then loads one by one, through registers."""
    return Tile(min(tile.block_m, 64), min(tile.block_n, 128), min(tile.block_k, 32), 8, 2)


def _fit(block: int, size: int) -> int:
    """A smaller power of two, at least 16, where the matrix is narrower than the block."""
    return max(16, min(block, 1 << max(size - 1, 0).bit_length()))


def shared_bytes(gemm: str, tile: Tile, itemsize: int, num_branches: int, *, tma: bool) -> int:
    """Shared memory that a program needs at most: operands of all stages, and what results leave through.

    Args:
        gemm: one of `tile_tables.GEMMS`.
        tile: its tile.
        itemsize: bytes of an element.
        num_branches: G.
        tma: whether rows are read by descriptors.
    """
    branches = num_branches if gemm == "up" else 1
    step = (tile.block_m + branches * tile.block_n) * tile.block_k
    # weight gradients load rows by indices that are loaded: one buffer per two stages
    buffers = (tile.num_stages + 1) // 2 if gemm in tile_tables.WEIGHT_GRADS else tile.num_stages
    if gemm in tile_tables.OVER_ROWS and tile.block_m < 64:
        # the products of warp groups read shared memory while the next copies arrive, those of warps do not
        buffers -= 1
    results, barriers = 0, 0
    # a flattened loop loads the next tile while this one's results go through shared memory
    if gemm in tile_tables.OVER_ROWS and (tile.flatten or (tile.ragged and tma)):
        results = tile.block_m * _columns_at_once(gemm, tile)
        barriers = _FLATTENED_BYTES * tile.flatten
    return (step * buffers + results) * itemsize + barriers


def _columns_at_once(gemm: str, tile: Tile) -> int:
    """Columns that results leave by: of H (or dH) and A' one buffer each, whatever the branches."""
    if gemm == "up":
        return 2 * min(tile.block_n, tile.chunk or UP_CHUNK)
    if gemm == "hidden_grad":  # and of H as it is read, where operands keep their place meanwhile
        return (2 + tile.flatten) * min(tile.block_n, tile.chunk or HIDDEN_GRAD_CHUNK)
    return tile.block_n // 2


def _fit_stages(
    gemm: str, tile: Tile, arch: str, itemsize: int, num_branches: int, *, tma: bool
) -> Tile:
    """Fewer stages, then shorter steps, where what a program needs does not fit the shared memory."""
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
    """How many programs run at once; 3 in the interpreter."""
    if device.type == "cpu":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def split_tile(device: torch.device, *, num_rows: int, num_programs: int) -> Tile:
    """Tiles of `split_product`, a step of which holds up to four blocks of operands."""
    arch = architecture(device)
    if arch == "interpreter":
        return Tile(64, 64, 64, 4, 1)
    if arch.startswith("gfx"):
        return Tile(64, 64, 32, 4, 2)
    if arch not in _LARGE:
        return Tile(64, 128, 32, 4, 3)
    is_small = num_rows <= 64 * num_programs
    if (
        arch != "sm_90"
    ):  # sums come out of tensor memory through shared memory, and four warps spill
        return Tile(64, 128, 64, 8, 3) if is_small else Tile(128, 128, 32, 8, 3)
    return Tile(64, 128, 64, 4, 3) if is_small else Tile(128, 128, 64, 8, 3)
