"""Choice of the type and library with the fastest matrix products for a model on this CPU: measured once, kept with the run.

A processor's flags do not suffice: one with BF16 instructions and without AMX multiplies FP32 faster than BF16, and small
products cost as much time in casts and calls as AMX saves.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from expertmesh.config.base import parse_json
from expertmesh.config.output_file import write_whole
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError, named
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.cpu.products import Library
from expertmesh.ops.onednn import has_onednn

USUAL_PRODUCTS = (Product(512, 512, 2048), Product(512, 512, 512, count=4))
"""Products that are measured for a model that names none."""

MARGIN = 0.9
"""Share of the usual time that BF16, or another library, must stay below to be chosen."""

_ROUGH, _FINE = 1 << 23, 1 << 25  # multiply-adds of one product
_HOPELESS = 2.0
_ROUNDS = 5
_BUDGET_S = 0.12


class MatmulChoice(NamedTuple):
    """Type and library of matrix products on a CPU.

    Attributes:
        dtype: the type of the factors.
        library: the library that multiplies FP32.
    """

    dtype: str
    library: Library

    @property
    def name(self) -> str:
        """Description of the choice."""
        if self.dtype == "bfloat16":
            return "bfloat16"
        return f"{self.dtype} by {'oneDNN' if self.library == 'onednn' else 'BLAS'}"


@dataclass(frozen=True)
class Arithmetic:
    """Device, type, library and threads of a run's computation.

    Attributes:
        device: "cpu" or "cuda".
        dtype: the type of matrix products.
        library: the library that multiplies FP32 on a CPU.
        seconds: measured time of a step's products for each choice, by name; empty if nothing was measured.
        threads: threads of the run on a CPU; None: a run of an old version, which did not record them.
    """

    device: str
    dtype: str
    library: Library
    seconds: Mapping[str, float] = field(default_factory=dict)
    threads: int | None = None

    @property
    def reason(self) -> str:
        """The measurement in words; empty if there was none."""
        times = sorted(self.seconds.items(), key=lambda item: item[1])
        return ", ".join(f"{name} {in_words(seconds)}" for name, seconds in times)


def in_words(seconds: float) -> str:
    """A time in words, with three digits: 12.3 ms, 1.25 s, 3,640 s."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:,.0f} s"


def fastest(products: Sequence[Product]) -> Arithmetic:
    """The fastest choice on this CPU, measured in well under a second of one thread's CPU time, which other work does not disturb.

    Args:
        products: products that dominate a step; empty: `USUAL_PRODUCTS`.
    """
    return choose(measure(products or USUAL_PRODUCTS))


def choose(seconds: Mapping[MatmulChoice, float]) -> Arithmetic:
    """The fastest choice, or FP32 by the usual library if no other is clearly faster (`MARGIN`).

    Args:
        seconds: seconds of each choice; FP32 by the usual library is among them.
    """
    best = MatmulChoice("float32", cpu_products.usual_library())
    for way in sorted(seconds, key=lambda way: way.dtype != "float32"):
        if seconds[way] < MARGIN * seconds[best]:
            best = way
    return Arithmetic("cpu", *best, {way.name: found for way, found in seconds.items()})


def measure(products: Sequence[Product]) -> dict[MatmulChoice, float]:
    """Seconds of each choice for the products of a forward and backward pass, casts of FP32 weights and inputs included.

    Large products are replaced by smaller ones (`cut`). A choice that is far slower on the smallest is not measured further.
    """
    ways = [MatmulChoice("float32", cpu_products.usual_library())]
    if has_onednn():
        ways += [
            way
            for way in (MatmulChoice("float32", "onednn"), MatmulChoice("float32", "blas"))
            if way not in ways
        ]
        ways.append(MatmulChoice("bfloat16", ways[0].library))
    rough = _measured([cut(p, _ROUGH) for p in products], ways, rounds=2, budget_s=_BUDGET_S)
    limit = _HOPELESS * min(rough.values())
    close = [way for way in ways if rough[way] <= limit or way == ways[0]]
    if len(close) == 1:
        return rough
    fine = _measured([cut(p, _FINE) for p in products], close, rounds=_ROUNDS, budget_s=_BUDGET_S)
    return rough | fine


def cut(product: Product, size: int) -> Product:
    """A product of at most `size` multiply-adds, its largest sides halved, and its count raised in proportion."""
    sides = [product.num_rows, product.in_features, product.out_features]
    while sides[0] * sides[1] * sides[2] > size:
        largest = sides.index(max(sides))
        sides[largest] = (sides[largest] + 1) // 2
    smaller = Product(*sides)
    return replace(smaller, count=max(1, round(product.count * product.size / smaller.size)))


def _measured(
    products: Sequence[Product], ways: Sequence[MatmulChoice], *, rounds: int, budget_s: float
) -> dict[MatmulChoice, float]:
    """Seconds of each choice from the shortest times of the products, measured by turns after a warm-up round."""
    best: dict[tuple[MatmulChoice, Product], float] = {}
    with torch.no_grad(), _one_thread():
        for number in range(rounds + 1):
            began = time.thread_time()
            for product in products:
                sides = (product.num_rows, product.in_features, product.out_features)
                x_MK, w_NK, grad_MN = (
                    torch.ones(sides[i], sides[j]) for i, j in ((0, 1), (2, 1), (0, 2))
                )
                for way in ways:
                    took = _time(way, x_MK, w_NK, grad_MN)
                    if number:
                        best[way, product] = min(took, best.get((way, product), took))
            if number:
                budget_s -= time.thread_time() - began
                if budget_s < 0:
                    break
    return {way: sum(best[way, p] * p.count for p in products) for way in ways}


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time(way: MatmulChoice, x_MK: Tensor, w_NK: Tensor, grad_MN: Tensor) -> float:
    """Seconds of a product's forward and backward, from FP32 values to FP32 gradients."""
    dtype = getattr(torch, way.dtype)
    grad = grad_MN.to(dtype)
    with cpu_products.multiplying_by(way.library):
        began = time.thread_time()
        x, w = x_MK.to(dtype), w_NK.to(dtype)
        cpu_products.product(x, w.T)
        cpu_products.product(grad, w).float()
        cpu_products.product(grad.T, x).float()
        return time.thread_time() - began


def read_arithmetic(path: Path) -> Arithmetic | None:
    """A run's `Arithmetic`, read from its file; None if there is none.

    Raises:
        ConfigError: the file is unreadable.
    """
    try:
        values = parse_json(path.read_bytes())
        found = Arithmetic(**values)
        if (
            found.library not in ("blas", "onednn")
            or found.device not in ("cpu", "cuda")
            or found.dtype not in ("float32", "bfloat16", "float16", "float64")
            or not isinstance(found.seconds, dict)
            or not (found.threads is None or (isinstance(found.threads, int) and found.threads > 0))
        ):
            raise ValueError(path)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ConfigError(
            f"{path}: is unreadable; delete it, and {named('train.dtype', 'auto')} measures anew"
        ) from None
    return found


def write_arithmetic(path: Path, arithmetic: Arithmetic) -> None:
    """Write the file, all of it or nothing."""
    write_whole(path, json.dumps(asdict(arithmetic), indent=1) + "\n")
