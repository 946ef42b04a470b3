"""Error messages for weights that are too large for memory: one line that names the option."""

from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec

import torch

from expertmesh.errors import ConfigError

_P = ParamSpec("_P")
_WORDS = (
    "overflow",
    "allocate memory",
    "not enough memory",
    "out of memory",
    "invalid buffer size",
)
"""Substrings of torch's error messages for weights larger than the address space or the memory."""
_NO_WEIGHTS = ("max_seq_len", "_ids", "seed", "layer_index", "group_size")


def names_large_sizes(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorator of an `__init__`: if its weights do not fit in memory, ConfigError names the largest integer option.

    Options are arguments, or fields of a configuration among them. On the meta device only sizes beyond the address
    space are refused.
    """

    @wraps(init)
    def named(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            init(*args, **kwargs)
        except (RuntimeError, MemoryError, OverflowError) as error:
            is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError | OverflowError)
            if not is_memory and not any(word in str(error).lower() for word in _WORDS):
                raise
            sizes = dict(_sizes({str(n): v for n, v in enumerate(args[1:])} | kwargs))
            if not sizes:
                raise
            name = max(sizes, key=lambda name: sizes[name])
            raise ConfigError(
                f"{name}={sizes[name]}: makes weights that are too large for memory; lower it, or use more ranks"
            ) from None

    return named


def _sizes(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, int]]:
    for name, value in options.items():
        if isinstance(value, int) and not isinstance(value, bool):
            if not name.endswith(_NO_WEIGHTS):
                yield prefix + name, value
        elif isinstance(value, tuple) and value and all(isinstance(one, int) for one in value):
            if not name.endswith(_NO_WEIGHTS):
                yield prefix + name, max(value)
        elif hasattr(value, "model_dump"):
            yield from _sizes(value.model_dump(), "model.")
        elif isinstance(value, Mapping):
            yield from _sizes(value, f"{prefix}{name}.")
