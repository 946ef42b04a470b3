"""Device and precision of a run, and their contexts: autocast, FP32 library, loss scaling."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from expertmesh.config.run import DEVICE_RULE, TrainConfig, is_device
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError, named
from expertmesh.ops.backend import cpu_kernels
from expertmesh.ops.cpu.products import multiplying_by, usual_library
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.scaler import LossScaler
from expertmesh.runs.arithmetic import Arithmetic, chosen, read_arithmetic, write_arithmetic

_log = logging.getLogger("expertmesh.training")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """Device and types of computation and parameters.

    Attributes:
        master_dtype: the type of parameters and optimizer state: FP64 for float64, else FP32; in inference, the type of
            the weights in the checkpoint.
    """

    device: torch.device  # device of the computation
    compute_dtype: torch.dtype  # the type of matrix multiplications
    master_dtype: torch.dtype
    arithmetic: Arithmetic  # the underlying choice, to be kept with the run

    @classmethod
    def of(cls, device: torch.device, arithmetic: Arithmetic) -> "Precision":
        """The precision of a choice on a device."""
        dtype = _DTYPES[arithmetic.dtype]
        return cls(device, dtype, accumulate_dtype(dtype), arithmetic)

    @property
    def description(self) -> str:
        """Type, device, kernels for CPUs and reason, in words."""
        dtype = str(self.compute_dtype).removeprefix("torch.")
        kernels = f", kernels {cpu_kernels()}" if self.device.type == "cpu" else ""
        reason = self.arithmetic.reason
        return f"{dtype} on {self.device}{kernels}" + (f" ({reason})" if reason else "")

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Context of a forward pass: autocast, if the types differ, and `products`."""
        if self.compute_dtype == self.master_dtype:
            with self.products():
                yield
            return
        with self.products(), torch.autocast(self.device.type, dtype=self.compute_dtype):
            yield

    def products(self) -> AbstractContextManager[None]:
        """Context in which the run's library multiplies FP32 on a CPU."""
        return multiplying_by(self.arithmetic.library)

    def scaler(self, ranks: Ranks | None = None) -> LossScaler:
        """Loss scaler; switched off unless the compute dtype is FP16, whose range is too small for gradients."""
        is_needed = self.compute_dtype == torch.float16
        return LossScaler(self.device.type, enabled=is_needed, ranks=ranks)


def resolve_precision(
    config: TrainConfig, *, products: Sequence[Product] = (), record: Path | None = None
) -> Precision:
    """The precision of a training run; "auto" becomes the recorded choice, or else the rule of `runs.arithmetic`.

    Args:
        products: products that dominate a step of its model; empty: usual ones.
        record: the run's file of its arithmetic; used if it exists and is of the same kind of device.
    """
    device = resolve_device(config.device)
    found = None if record is None else read_arithmetic(record)
    if found is None or found.device != device.type:
        found = _arithmetic(config.dtype, device, products)
    elif config.dtype != "auto":
        found = replace(found, dtype=config.dtype, reason="")
    return Precision.of(device, found)


def settle_precision(
    config: TrainConfig, *, products: Sequence[Product] = (), record: Path, is_exact: bool = False
) -> Precision:
    """`resolve_precision`, and write its choice to the record, with the kernels for CPUs; for one rank, which tells the
    others.

    Says so where an exact run (`is_exact`) goes on by other kernels than it began with.
    """
    precision = resolve_precision(config, products=products, record=record)
    found = precision.arithmetic
    now = cpu_kernels() if found.device == "cpu" else None
    if is_exact and found.kernels is not None and now not in (None, found.kernels):
        _log.warning(
            "the run was exact by the kernels %s and goes on by %s: losses in evaluation differ in bits from here on",
            *(found.kernels, now),
        )
    precision = replace(precision, arithmetic=replace(found, kernels=now))
    write_arithmetic(record, precision.arithmetic)
    return precision


def is_exact(options: Mapping[str, Any]) -> bool:
    """Whether options of a run, as plain values, ask for a batch-invariant model or layer."""
    return any(
        is_exact(value) if isinstance(value, Mapping) else name == "batch_invariant" and bool(value)
        for name, value in options.items()
    )


def _arithmetic(dtype: str, device: torch.device, products: Sequence[Product]) -> Arithmetic:
    if dtype != "auto":
        return Arithmetic(device.type, dtype, usual_library())
    if device.type == "cpu":
        return chosen(products)
    has = torch.cuda.is_bf16_supported(including_emulation=False)
    why = f"auto: the GPU has {'' if has else 'no '}BF16"
    return Arithmetic(device.type, "bfloat16" if has else "float32", usual_library(), why)


def trained_precision(record: Path, config: TrainConfig, device: torch.device) -> Precision | None:
    """The precision that a run was trained in, on any device; None: neither its record nor its config says."""
    found = read_arithmetic(record)
    if found is None and config.dtype == "auto":
        return None
    if found is None or found.device != device.type or config.dtype not in ("auto", found.dtype):
        dtype = config.dtype if found is None or config.dtype != "auto" else found.dtype
        found = Arithmetic(device.type, dtype, usual_library())
    return Precision.of(device, replace(found, reason="as it was trained"))


def plain_precision(dtype: torch.dtype, device: torch.device, reason: str = "") -> Precision:
    """Precision of weights and products in one type, by PyTorch's usual library."""
    name = str(dtype).removeprefix("torch.")
    found = Arithmetic(device.type, name, usual_library(), reason)
    return Precision(device, dtype, dtype, found)


def resolve_device(name: str, *, option: str = "train.device") -> torch.device:
    """The device of a name: auto, cpu, cuda or cuda:N."""
    if not is_device(name):
        raise ConfigError(option, name, DEVICE_RULE, "for example cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"{named(option, name)}: this machine has {count} usable GPUs; use cpu or auto"
            if not count
            else f"{named(option, name)}: this machine has {count} GPUs, numbered from 0; choose one of them"
        )
    return device
