"""Type, library, kernels and threads of a run's computation on a CPU: chosen by instructions and sizes, never by a
clock, kept with the run.

They change bits, so equal commands on one kind of machine need equal choices, however busy it is. BF16 is chosen
where AMX multiplies it: with BF16 instructions and without AMX a processor multiplies FP32 faster, and small products
cost as much time in casts and calls as AMX saves.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isqrt
from pathlib import Path

import torch

from expertmesh.config.base import parse_json
from expertmesh.config.output_file import write_whole
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError, named
from expertmesh.ops.backend import CPU_KERNELS
from expertmesh.ops.cpu.products import Library, usual_library

USUAL_PRODUCTS = (Product(512, 512, 2048), Product(512, 512, 512, count=4))
"""Products of a model that names none."""

LEAST_FOR_AMX = 1 << 24
"""Multiply-adds from which AMX saves more time than casts to BF16 cost; the mean over a step's multiply-adds counts."""

_OF_TWO_THREADS = 1 << 24
"""Multiply-adds of a product that two threads multiply faster than one by more than a tenth, other operations
included."""


@dataclass(frozen=True)
class Arithmetic:
    """Device, type, library and threads of a run's computation.

    Attributes:
        kernels: name of the kernels for CPUs that the run last computed by, see `ops.backend.cpu_kernels`; None: on a
            GPU, or not recorded by an old version.
    """

    device: str  # "cpu" or "cuda"
    dtype: str  # the type of matrix products
    library: Library  # the library that multiplies FP32 on a CPU
    reason: str = ""  # why "auto" is this type, in a few words; empty: the type was given
    threads: int | None = None  # threads of the run on a CPU; None: a run of an old version, which did not record them
    kernels: str | None = None


def chosen(products: Sequence[Product], *, has_amx: bool | None = None) -> Arithmetic:
    """The choice of `auto` on this CPU: BF16 where AMX multiplies products of this size faster, else FP32.

    Args:
        has_amx: whether the processor has AMX; None: ask it.
    """
    products = products or USUAL_PRODUCTS
    if has_amx is None:
        has_amx = torch.cpu._is_amx_tile_supported() and torch.backends.mkldnn.is_available()
    total = sum(p.size * p.count for p in products)
    mean = sum(p.size**2 * p.count for p in products) // max(total, 1)
    if not has_amx:
        return Arithmetic("cpu", "float32", usual_library(), "auto: the processor has no AMX")
    if mean < LEAST_FOR_AMX:
        why = f"auto: products of {mean / 1e6:.1f} M multiply-adds are too small for AMX"
        return Arithmetic("cpu", "float32", usual_library(), why)
    return Arithmetic("cpu", "bfloat16", usual_library(), "auto: the processor has AMX")


def threads_for(products: Sequence[Product]) -> int:
    """Number of threads for products: the square root of their mean size, in products that need two.

    N threads take 1 / N of the multiplication, and waiting for N threads grows with N; the sum is least at such a root.
    """
    products = products or USUAL_PRODUCTS
    count = sum(p.count for p in products)
    mean = sum(p.size * p.count for p in products) // max(count, 1)
    return max(1, isqrt(4 * mean // _OF_TWO_THREADS))


def read_arithmetic(path: Path) -> Arithmetic | None:
    """A run's `Arithmetic`, read from its file; None if there is none."""
    try:
        values = parse_json(path.read_bytes())
        values.pop("seconds", None)  # older runs measured
        found = Arithmetic(**values)
        if (
            found.library not in ("blas", "onednn")
            or found.device not in ("cpu", "cuda")
            or found.dtype not in ("float32", "bfloat16", "float16", "float64")
            or not isinstance(found.reason, str)
            or not (found.threads is None or (isinstance(found.threads, int) and found.threads > 0))
            or found.kernels not in (None, *CPU_KERNELS)
        ):
            raise ValueError(path)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{path}: is unreadable; delete it, and {named('train.dtype', 'auto')} chooses anew"
        ) from None
    return found


def write_arithmetic(path: Path, arithmetic: Arithmetic) -> None:
    """Write the file, all of it or nothing."""
    write_whole(path, json.dumps(asdict(arithmetic), indent=1) + "\n")
