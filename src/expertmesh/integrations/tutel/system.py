"""Replacement for `tutel.system`: start of the ranks, time, files by rank."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from expertmesh.comm.start import start_group
from expertmesh.config.values import check_choice
from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel import refused
from expertmesh.integrations.tutel.rank_groups import RankGroups, create_groups_from_world

_TIMEOUT_S = 86400.0
_log = logging.getLogger(__name__)

__getattr__ = refused.refusing("tutel.system")

_session: RankGroups | None = None


def init_data_model_parallel(group_count: int = 1, backend: str = "nccl") -> RankGroups:
    """Start the ranks that torchrun launched, or one process without it, and part them into groups.

    Args:
        group_count: number of groups of neighbouring ranks; negative: ranks per group.
        backend: "nccl" or "gloo"; gloo where there is no GPU.

    Returns:
        The ranks, groups and the device of this process; `get_local_session` returns it again.

    Example:
        >>> session = init_data_model_parallel(backend="gloo")
        >>> session.global_rank, session.global_size
        (0, 1)
    """
    global _session
    check_choice("backend", backend, ["nccl", "gloo"])
    if backend == "nccl" and not torch.cuda.is_available():
        _log.warning("backend='nccl': there is no GPU; ranks use gloo and CPUs")
        backend = "gloo"
    if "RANK" not in os.environ and int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"OMPI_COMM_WORLD_SIZE={os.environ['OMPI_COMM_WORLD_SIZE']}: ranks of mpiexec do not know one another "
            "here; start them with torchrun"
        )
    if "RANK" in os.environ and not dist.is_initialized():
        start_group(backend, timeout_s=float(os.environ.get("TUTEL_GLOBAL_TIMEOUT_SEC", _TIMEOUT_S)))
    _session = create_groups_from_world(group_count, backend)
    return _session


def get_local_session() -> RankGroups:
    """Return the session that `init_data_model_parallel` made last."""
    if _session is None:
        raise ConfigError("there is no session; call system.init_data_model_parallel first")
    return _session


def record_time(is_cuda: bool | None = None) -> float:
    """Seconds of a clock for measuring, after the GPU has finished.

    Args:
        is_cuda: whether to wait for the GPU; None: as the session has it.
    """
    if get_local_session().is_cuda if is_cuda is None else is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def perform(fn: Callable[[], Any], num_runs: int = 100) -> float:
    """Seconds of a call, the mean of so many after five calls; printed, too."""
    for _ in range(5):
        fn()
    begin = record_time()
    for _ in range(num_runs):
        fn()
    seconds = max((record_time() - begin) / num_runs, 1e-6)
    print(f"Function Latency = {seconds:.8f} sec\n")  # noqa: T201
    return seconds


def apply_rank_size_from_pattern(filename: str, rank: int, size: int, create_dir: bool = True) -> str:
    """Replace `{rank}` and `{size}` in a file's name, and make its folder.

    Example:
        >>> apply_rank_size_from_pattern("{rank}-of-{size}.ckpt", rank=1, size=2)
        '1-of-2.ckpt'
    """
    if "{rank}" not in filename:
        _log.warning("%s: has no {rank}, so that ranks write the same file", filename)
    filename = filename.replace("{rank}", str(rank)).replace("{size}", str(size))
    if create_dir:
        Path(filename).parent.mkdir(parents=True, exist_ok=True)
    return filename


def save(t: torch.Tensor, path: str) -> None:
    """Write a tensor as a NumPy file."""
    import numpy as np

    np.save(path, t.detach().cpu().numpy())


def load(path: str, device: torch.device | str | None = None) -> torch.Tensor:
    """Read a tensor from a NumPy file; objects in it are refused."""
    import numpy as np

    return torch.tensor(np.load(path, allow_pickle=False), device=device)


class _Cache:
    """Values by key, as `cache()` returns it."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def reset(self) -> None:
        """Forget all values."""
        self._values.clear()

    def set(self, key: Any, val: Any) -> None:
        """Keep a value."""
        self._values[key] = val

    def get(self, key: Any = None) -> Any:
        """The value of a key; of one that is not there, all values."""
        return self._values[key] if key in self._values else list(self._values.values())


_cache = _Cache()


def cache() -> _Cache:
    """The cache of this process."""
    return _cache
