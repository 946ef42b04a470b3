"""Checks of the arguments of a model's call: shape, dtype, device and range, each error in one line.

Values, such as ids, are checked on CPUs only, and not inside torch.compile, a trace or a transform. On a GPU the host would
have to wait for them, and a compiled graph would break. All other properties are known to the host.
"""

from typing import Any

import torch
from torch import Tensor, nn

from expertmesh.errors import ConfigError
from expertmesh.models.attention import DenseContext
from expertmesh.models.cache import KVCache
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.plain_call import can_look_at

_IDS = (torch.int64, torch.int32)


def check_tensor(name: str, value: Any, *, what: str) -> None:
    """Raise ConfigError unless a value is a dense tensor.

    Args:
        name: name of the argument.
        value: the argument.
        what: description of a valid argument.
    """
    if not isinstance(value, Tensor):
        raise ConfigError(
            f"{name} is a {type(value).__name__}; it must be {what}; convert it with torch.tensor"
        )
    if value.is_nested or value.layout != torch.strided:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ConfigError(
            f"{name} is a {kind} tensor; it must be {what}; convert it to a dense one"
        )


def check_ids(
    ids: Any, *, vocab_size: int, max_len: int | None, name: str = "ids_BS", what: str = "sequence"
) -> None:
    """Raise ConfigError unless ids are (sequences, tokens) token ids of nonempty sequences within max_len; zero rows are valid.

    Args:
        ids: the argument.
        vocab_size: V; ids are below it.
        max_len: maximum tokens of a sequence; None: checked elsewhere.
        name: name of the argument.
        what: name of a row, such as "sequence" or "source".
    """
    check_tensor(name, ids, what="a tensor (sequences, tokens) of integer ids")
    if ids.ndim != 2 or ids.dtype not in _IDS:
        raise ConfigError(
            f"{name} has shape {tuple(ids.shape)} and dtype {ids.dtype}; it must be (sequences, tokens) of integer ids (int64); one"
            f" sequence is {name.removesuffix('_BS')}[None], and ids.long() converts"
        )
    if ids.shape[1] < 1:  # zero rows are valid: a rank may have none
        raise ConfigError(
            f"{name} has shape {tuple(ids.shape)}; it must hold a token in each {what}; leave the call out"
        )
    if max_len is not None and ids.shape[1] > max_len:
        limit = "max_seq_len=" if what == "sequence" else ""
        raise ConfigError(
            f"a {what} of {ids.shape[1]} tokens: must be at most {limit}{max_len}; shorten it"
        )
    check_range(
        name, ids, below=vocab_size, fix="use the tokenizer that the model was trained with"
    )


def check_range(name: str, values: Tensor, *, below: int, fix: str, but: int | None = None) -> None:
    """Raise ConfigError unless all values are from 0 to below - 1; skipped if the host cannot read them (`can_look_at`).

    Args:
        name: name of the argument.
        values: integers.
        below: exclusive upper bound.
        fix: the fix, for the message.
        but: a further valid number.
    """
    if not can_look_at(values):
        return
    low, high = (int(v) for v in values.aminmax())
    if low >= 0 and high < below:
        return
    wrong = (values < 0) | (values >= below)
    if but is not None:
        wrong &= values != but
    if bool(wrong.any()):
        first = int(values[wrong][0])
        also = "" if but is None else f", or {but}"
        raise ConfigError(f"{name} holds {first}; it must be from 0 to {below - 1}{also}; {fix}")


def check_shape(name: str, value: Any, like: Tensor, shape: tuple[int, ...], *, of: str) -> None:
    """Raise ConfigError unless a tensor has a shape and is on the device of another tensor.

    Args:
        name: name of the argument.
        value: the argument.
        like: tensor on the required device.
        shape: required shape.
        of: meaning of the shape, for the message.
    """
    check_tensor(name, value, what=f"a tensor of shape {shape}, {of}")
    # not ==, which torch.compile cannot guard on where a size is a symbol
    if value.ndim != len(shape) or any(a != b for a, b in zip(value.shape, shape, strict=True)):
        raise ConfigError(
            f"{name} has shape {tuple(value.shape)}; it must be {tuple(shape)}, {of}; reshape it, or cut it"
        )
    check_device(name, value, like.device)


def check_device(name: str, value: Tensor, device: torch.device) -> None:
    """Raise ConfigError unless a tensor is on a device."""
    if value.device != device:
        raise ConfigError(
            f"{name} is on {value.device}; it must be on {device}; move it with .to()"
        )


def check_mask(
    name: str, mask: Any, like: Tensor, *, of: str = "one entry per token, True for real ones"
) -> None:
    """Raise ConfigError unless a token mask is bool and has the shape of the tokens.

    Args:
        name: name of the argument.
        mask: the argument.
        like: (B, S) the tokens.
        of: meaning of the shape, for the message.
    """
    check_shape(name, mask, like, tuple(like.shape), of=of)
    if mask.dtype != torch.bool:
        raise ConfigError(
            f"{name} has dtype {mask.dtype}; it must be bool; convert it with .bool()"
        )


def check_whole(
    name: str, value: Any, like: Tensor, shapes: tuple[tuple[int, ...], ...], *, of: str
) -> None:
    """Raise ConfigError unless a tensor holds integers, has one of the given shapes and is on the device of another tensor.

    Args:
        name: name of the argument.
        value: the argument.
        like: tensor on the required device.
        shapes: valid shapes.
        of: meaning of the shapes, for the message.
    """
    fits = isinstance(value, Tensor) and any(
        value.ndim == len(shape) and all(a == b for a, b in zip(value.shape, shape, strict=True))
        for shape in shapes
    )
    if not fits:
        check_shape(name, value, like, shapes[0], of=of)
    check_tensor(name, value, what="a tensor of integers")
    check_device(name, value, like.device)
    if value.dtype == torch.bool or value.is_floating_point() or value.is_complex():
        raise ConfigError(f"{name} has dtype {value.dtype}; it must be an integer type; convert it")


def check_rows(name: str, rows: Any, ids: Tensor, *, of: str, fix: str) -> None:
    """Raise ConfigError unless rows are (N,) int64 or int32 indices of `ids.flatten()`.

    Args:
        name: name of the argument.
        rows: the argument.
        ids: (B, S) the tokens.
        of: meaning of the shape, for the message.
        fix: the fix of an index out of range, for the message.
    """
    shape = (rows.numel(),) if isinstance(rows, Tensor) else (0,)
    check_whole(name, rows, ids, (shape,), of=of)
    if rows.dtype not in _IDS:  # index_select takes no other
        raise ConfigError(
            f"{name} has dtype {rows.dtype}; it must be int64 or int32; convert it with .long()"
        )
    check_range(name, rows, below=ids.numel(), fix=fix)


def check_count(name: str, value: Any, *, least: int, fix: str) -> None:
    """Raise ConfigError unless a number is an integer and at least `least`.

    Args:
        name: name of the argument.
        value: the argument.
        least: minimum.
        fix: the fix, for the message.
    """
    is_whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not is_whole or value < least:
        shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
        raise ConfigError(f"{name}={shown}: must be whole and at least {least}; {fix}")


def check_home(name: str, value: Tensor, module: nn.Module, weight: Tensor) -> None:
    """Raise ConfigError unless an input is on the device of a module's weight; skipped for sharded weights and hooked modules.

    Args:
        name: name of the argument.
        value: the argument.
        module: module that receives it.
        weight: weight of the module.
    """
    if type(weight) not in (Tensor, nn.Parameter) or hasattr(module, "_hf_hook"):
        return
    if weight.device != value.device:
        fix = (
            "call to_empty() and init_weights()"
            if weight.is_meta
            else "move one of them with .to()"
        )
        raise ConfigError(f"{name} is on {value.device} and the model on {weight.device}; {fix}")


def check_cache(cache: Any, *, config: Any, weight: Tensor) -> None:
    """Raise ConfigError unless a cache fits a model; `KVCache.check_new` checks the tokens.

    Args:
        cache: the argument.
        config: configuration of the model.
        weight: a weight of the model in its compute dtype.
    """
    if not callable(getattr(cache, "begin", None)):
        raise ConfigError(
            f"cache is a {type(cache).__name__}; it must be a cache of keys and values; make one with model.new_cache(batch_size=..., max_len=...)"
        )
    if not isinstance(cache, KVCache):
        return
    layers, _, heads, _, size = cache.shape
    if (layers, heads, size) != (config.num_layers, config.cache_heads, config.cache_size):
        raise ConfigError(
            f"cache has {layers} layers of {heads} heads of {size}; the model has {config.num_layers} of {config.cache_heads} of "
            f"{config.cache_size}; make one with its new_cache()"
        )
    if autocast_dtype(cache.device) is None and cache.dtype != weight.dtype:
        raise ConfigError(
            f"cache has dtype {cache.dtype} and the model {weight.dtype}; make one with its new_cache(), under the same autocast"
        )


def check_context(context: Any, ids_BS: Tensor, *, config: Any, weight: Tensor) -> None:
    """Raise ConfigError unless a value is an `AttentionContext` for these tokens and this model.

    Args:
        context: the argument.
        ids_BS: the tokens.
        config: configuration of the model.
        weight: a weight of the model.
    """
    if not callable(getattr(context, "attend", None)):
        raise ConfigError(
            f"context is a {type(context).__name__}; it must be an AttentionContext; take it from the cache's begin()"
        )
    if not isinstance(context, DenseContext):
        return
    B, S = ids_BS.shape
    if context.visible.num_queries != S:
        raise ConfigError(
            f"context is of {context.visible.num_queries} tokens and ids_BS of {S}; they must be as many; begin() with these"
        )
    if isinstance(context.cache, KVCache):
        check_cache(context.cache, config=config, weight=weight)
        if context.cache.batch_size != B:
            raise ConfigError(
                f"context is of {context.cache.batch_size} sequences and ids_BS of {B}; they must be as many; begin() with these"
            )
