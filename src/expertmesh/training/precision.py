"""Which device, which precision, and the contexts that go with them."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from expertmesh.config.run import TrainConfig
from expertmesh.errors import ConfigError
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.scaler import LossScaler

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class Precision:
    """How numbers are kept and computed.

    Attributes:
        device: where.
        compute_dtype: of matrix multiplications.
        master_dtype: of parameters and optimiser state: FP64 for float64, else FP32.
    """

    device: torch.device
    compute_dtype: torch.dtype
    master_dtype: torch.dtype

    @property
    def uses_autocast(self) -> bool:
        """Whether the forward pass casts to another dtype than the parameters'."""
        return self.compute_dtype != self.master_dtype

    @property
    def uses_scaler(self) -> bool:
        """Whether gradients need loss scaling (FP16's range is too small for them)."""
        return self.compute_dtype == torch.float16

    def autocast(self) -> AbstractContextManager[object]:
        """Context of a forward pass."""
        if not self.uses_autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def scaler(self, ranks: Ranks | None = None) -> LossScaler:
        """Loss scaler; switched off unless the compute dtype is FP16.

        Args:
            ranks: ranks among which gradients are spread; None: this process alone.
        """
        return LossScaler(self.device.type, enabled=self.uses_scaler, ranks=ranks)


def resolve_precision(config: TrainConfig) -> Precision:
    """Turn "auto" into what this machine does well.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    device = _resolve_device(config.device)
    dtype = fast_dtype(device) if config.dtype == "auto" else _DTYPES[config.dtype]
    master = accumulate_dtype(dtype)
    return Precision(device, dtype, master)


def fast_dtype(device: torch.device) -> torch.dtype:
    """BF16 where the hardware multiplies it faster than FP32 (AMX, AVX512-BF16, GPUs that support it), else FP32."""
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _resolve_device(name: str) -> torch.device:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if count else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ConfigError(
            f"train.device={name}: this machine has {count} usable GPUs; use cpu or auto"
            if not count
            else f"train.device={name}: this machine has {count} GPUs, numbered from 0; choose one of them"
        )
    return device
