"""Calls of the compiled kernels: tensors' addresses and sizes, written into the structs that `work.h` declares."""

import ctypes
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertmesh.kernels.cpu.attention_call import AttentionCall
from expertmesh.kernels.cpu.build import BuildError, built
from expertmesh.kernels.cpu.instructions import NAMES, TORCH, InstructionSet, allowed_sets
from expertmesh.kernels.cpu.noted import NO_MEMORY, call
from expertmesh.kernels.cpu.rows_call import RowsCall

_log = logging.getLogger("expertmesh.ops")

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
"""Stored types as `weights.h` numbers them; uint8 holds two numbers of 4 bits."""
INNER = {"silu": 0, "gelu": 1, "relu": 2, "relu2": 3, "clamped_silu": 4}
"""Point-wise functions as `activations.h` numbers them."""


@dataclass(frozen=True)
class ExpertMatrices:
    """Matrices of experts with their scales and biases."""

    numbers_EGNK: Tensor  # (E, G, N, K), or (E, G, N, K / 2) bytes for 4 bits; numbers of a row are adjacent
    scales_EGNS: Tensor | None = None  # (E, G, N, S) float32 or bfloat16, S = 1 for int8; None for dense numbers
    bias_EGN: Tensor | None = None  # (E, G, N) float32 or bfloat16, or None

    def words(self) -> tuple[int, ...]:
        """The struct `Matrices`."""
        w, scales, bias = self.numbers_EGNK, self.scales_EGNS, self.bias_EGN
        E, G, N, K = w.shape
        if w.dtype == torch.uint8:
            K *= 2
        size = w.element_size()
        of_expert, of_branch, of_row, _ = w.stride()
        return (
            w.data_ptr(),
            of_expert * size,
            of_branch * size,
            of_row * size,
            *_address(scales, 3),
            *_address(bias, 2),
            KINDS[w.dtype],
            0 if scales is None else KINDS[scales.dtype],
            0 if bias is None else KINDS[bias.dtype],
            0 if scales is None else K // scales.shape[3],
            G,
            N,
            K,
        )


class TilesError(Exception):
    """The system does not grant tiles."""


_RUNTIMES = ("libgomp", "libomp", "libiomp")
_is_child = threading.Event()
"""Set in a forked process: the threads of the OpenMP runtime stay with the parent, so the child computes with one."""
os.register_at_fork(after_in_child=_is_child.set)


def num_threads() -> int:
    """Threads of a call."""
    return 1 if _is_child.is_set() else torch.get_num_threads()


def _entries_of_runtime() -> list[int] | None:
    """Addresses of the functions that `threads.h` calls, in the OpenMP runtime that torch brings, else in the one of
    this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = {words[5] for words in (line.split(maxsplit=5) for line in lines) if len(words) == 6}
    paths = {path for path in files if Path(path).name.startswith(_RUNTIMES)}
    home = Path(torch.__file__).parent
    brought = (home, home.with_name("torch.libs"))
    own = {path for path in paths if any(Path(path).is_relative_to(one) for one in brought)}
    paths = own or paths
    if len(paths) != 1:
        return None
    names = ("GOMP_parallel", "GOMP_barrier", "omp_get_thread_num", "omp_get_num_threads")
    try:
        runtime = ctypes.CDLL(paths.pop(), mode=os.RTLD_NOLOAD)
        found = [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value for name in names]
    except (OSError, AttributeError):
        return None
    return [address for address in found if address is not None]


@dataclass(frozen=True)
class Loaded:
    """The kernels of this process."""

    kernels: "Kernels | None"  # the kernels; None: there are none
    # why there are none, or why a lower instruction set is used; one line, "" if there is nothing to say
    problem: str = ""

    @property
    def name(self) -> str:
        """Name of the instruction set, or "torch"; in `NAMES`."""
        return TORCH if self.kernels is None else self.kernels.instructions.name


_lock = threading.Lock()
# a child whose parent is loading would wait for ever
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)
_loaded: list[Loaded] = []


def loaded() -> Loaded:
    """Return the kernels for the best instruction set; the first call compiles them if need be, and says what went
    wrong."""
    if not _loaded:
        with _lock:
            if not _loaded:
                _loaded.append(load())
    return _loaded[0]


def lower(name: str) -> None:
    """Compute by a lower instruction set of this processor from now on, or by PyTorch's products; its name is in
    `NAMES`."""
    with _lock:
        _loaded[:] = [load(best=name)]


def opened(instructions: InstructionSet) -> "Kernels":
    """The kernels of an instruction set, compiled if need be."""
    with built(instructions) as path:
        return Kernels(path, instructions)


def load(best: str = NAMES[0], *, of_set: Callable[[InstructionSet], "Kernels"] = opened) -> Loaded:
    """Load the kernels for the best instruction set that works, from `best` on, see `loaded`."""
    if best == TORCH:
        return Loaded(None, "another rank of this job has none")
    problem = ""
    for instructions in allowed_sets():
        if NAMES.index(instructions.name) < NAMES.index(best):
            continue
        try:
            return Loaded(of_set(instructions), problem)
        # no tiles, no compiler, one that is too old for the set, a file that cannot be loaded or lacks our functions
        except (TilesError, BuildError, OSError, AttributeError) as error:
            problem = problem or str(error).partition("\n")[0]
    _log.warning("experts on this CPU are computed by PyTorch's own products: %s", problem)
    return Loaded(None, problem)


def _of_columns(num_columns: int) -> tuple[int, ...]:
    """The struct `Matrices` without matrices."""
    return *(0,) * (_MATRICES - 1), num_columns


def _address(t: Tensor | None, num_strides: int) -> tuple[int, ...]:
    """Address and first strides in bytes; zeros for None."""
    if t is None:
        return (0,) * (num_strides + 1)
    size = t.element_size()
    return t.data_ptr(), *(stride * size for stride in t.stride()[:num_strides])


_MATRICES = 18
_NUM_WORDS = 2 * _MATRICES + 13
_Words = ctypes.c_int64 * _NUM_WORDS


class Kernels:
    """The kernels of one instruction set. `path`: the shared object, which is needed in this call only."""

    def __init__(self, path: Path, instructions: InstructionSet) -> None:
        loaded = ctypes.CDLL(str(path))
        self.instructions = instructions  # the instruction set
        self._experts = loaded.expertmesh_experts
        self._experts.argtypes = [ctypes.c_void_p]
        self._experts.restype = ctypes.c_int
        self._attention = loaded.expertmesh_attention
        self._attention.argtypes = [ctypes.c_void_p]
        self._attention.restype = ctypes.c_int
        self._rows = loaded.expertmesh_rows
        self._rows.argtypes = [ctypes.c_void_p]
        self._rows.restype = None
        if instructions.has_tiles and not loaded.expertmesh_grants_tiles():
            raise TilesError("the system does not let this process use tiles")
        entries = _entries_of_runtime()
        # whether it uses the threads of the OpenMP runtime that torch has loaded
        self.has_threads = entries is not None
        if entries is None:
            _log.warning("the kernels in C compute on one thread: which OpenMP runtime is torch's is not known")
        else:
            loaded.expertmesh_use_threads(*map(ctypes.c_void_p, entries))

    def experts(
        self,
        x_TD: Tensor,  # (T, D) float32 or bfloat16
        ids_TK: Tensor,  # (T, K) int64 in [0, E]; E is no expert
        weights_TK: Tensor,  # (T, K) float32
        w_in: ExpertMatrices,  # (E, G, F, D)
        w_out: ExpertMatrices,  # (E, 1, D, F)
        *,
        inner: str,  # name of the point-wise function, see `INNER`
        num_experts: int,  # E
        hidden_RH: Tensor | None = None,
    ) -> tuple[Tensor, int, int]:
        """Compute y (T, D) of contiguous tensors, and the least and the largest id; y is undefined if one is out of
        range.

        Args:
            hidden_RH: (R, G * F) in x's dtype, into which the pre-activations of the R live rows are written; or None.
        """
        y_TD = torch.empty_like(x_TD)
        hidden = 0 if hidden_RH is None else hidden_RH.data_ptr()
        given = w_in.words(), w_out.words(), x_TD, y_TD, hidden, ids_TK, weights_TK, num_experts, inner
        least, most = self._run(*given, w_in, w_out, hidden_RH)
        return y_TD, least, most

    def linear(self, x_TK: Tensor, w_ENK: Tensor, b_EN: Tensor | None, ids_T1: Tensor | None = None) -> Tensor:
        """Compute x W^T + b, (T, N) in x's dtype, of contiguous rows (T, K) float32 or bfloat16.

        Args:
            ids_T1: contiguous int64 matrix of each row; None: the first.
        """
        T, K = x_TK.shape
        E, N, _ = w_ENK.shape
        y_TN = x_TK.new_empty(T, N)
        w_out = ExpertMatrices(w_ENK[:, None], None, None if b_EN is None else b_EN[:, None])
        ids_T1 = torch.zeros(T, 1, dtype=torch.int64) if ids_T1 is None else ids_T1
        self._run(_of_columns(K), w_out.words(), x_TK, y_TN, 0, ids_T1, torch.ones(T, 1), E, "relu", w_out)
        return y_TN

    def attention(self, given: AttentionCall, *tensors: Tensor | None) -> None:
        """Compute a call on these tensors."""
        given.num_threads = num_threads()
        if call(self._attention, given, *tensors) == NO_MEMORY:
            raise MemoryError("no memory for a block of keys")

    def rows(self, given: RowsCall, *tensors: Tensor | None) -> None:
        """Compute a call on these tensors."""
        given.num_threads = num_threads()
        call(self._rows, given, *tensors)

    def _run(
        self,
        w_in: tuple[int, ...],
        w_out: tuple[int, ...],
        x_TD: Tensor,
        y_TD: Tensor,
        hidden: int,
        ids_TK: Tensor,
        weights_TK: Tensor,
        num_experts: int,
        inner: str,
        *kept: Any,
    ) -> tuple[int, int]:
        """Call the kernels, on matrices and other tensors that are `kept`; the least and the largest id."""
        words = _Words(
            *w_in,
            *w_out,
            x_TD.data_ptr(),
            y_TD.data_ptr(),
            hidden,
            weights_TK.data_ptr(),
            ids_TK.data_ptr(),
            *ids_TK.shape,
            num_experts,
            KINDS[x_TD.dtype],
            INNER[inner],
            num_threads(),
            0,
            0,
        )
        tensors = x_TD, y_TD, ids_TK, weights_TK, *kept
        if call(self._experts, words, *tensors) == NO_MEMORY:
            raise MemoryError("no memory for the experts' rows")
        return words[_NUM_WORDS - 2], words[_NUM_WORDS - 1]
