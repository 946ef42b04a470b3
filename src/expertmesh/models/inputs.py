"""Checks of token ids, places, caches and contexts in a call of a model. Tensors are declared as in `ops/check.py`."""

from typing import Any

from torch import Tensor, nn

from expertmesh.config.values import wrong_type
from expertmesh.errors import ConfigError
from expertmesh.models.attention import DenseContext
from expertmesh.models.cache import KVCache
from expertmesh.ops.check import BOOL, IDS, MOVE, Arg, check_device, check_tensor
from expertmesh.ops.dtypes import autocast_dtype

MASK = Arg("BS", BOOL, "one entry per token, True for real ones")
"""A mask of the tokens of sequences."""
_IDS = Arg(
    "BS",
    IDS,
    "token ids of B sequences",
    some="S",
    below="V",
    fix="use the tokenizer that the model was trained with",
    reshape="give one sequence of S tokens as ids[None]",
)


def check_ids(ids: Any, *, vocab_size: int, max_len: int | None, name: str = "ids_BS", what: str = "sequence") -> None:
    """Raise ConfigError unless ids are (sequences, tokens) token ids of nonempty sequences within max_len; zero rows
    are valid."""
    check_tensor(name, ids, _IDS, {"V": vocab_size})
    if max_len is not None and ids.shape[1] > max_len:
        limit = "max_seq_len=" if what == "sequence" else ""
        raise ConfigError(f"a {what} of {ids.shape[1]} tokens: must be at most {limit}{max_len}; shorten it")


def check_mask(name: str, mask_BS: Any, ids_BS: Tensor) -> None:
    """Raise ConfigError unless a mask is of these tokens."""
    B, S = ids_BS.shape
    check_tensor(name, mask_BS, MASK, {"B": B, "S": S}, device=ids_BS.device)


def check_home(name: str, value: Tensor, module: nn.Module, weight: Tensor) -> None:
    """Raise ConfigError unless an input is on the device of a module's weight; skipped for sharded weights and hooked
    modules."""
    if type(weight) in (Tensor, nn.Parameter) and not hasattr(module, "_hf_hook"):
        fix = "call to_empty() and init_weights()" if weight.is_meta else MOVE
        check_device(name, value, weight.device, of="the model", fix=fix)


def check_cache(cache: Any, *, config: Any, weight: Tensor) -> None:
    """Raise ConfigError unless a cache fits a model; `KVCache.check_new` checks the tokens."""
    if not callable(getattr(cache, "begin", None)):
        fix = "make one with model.new_cache(batch_size=..., max_len=...)"
        raise wrong_type("cache", cache, "a cache of keys and values", fix)
    if not isinstance(cache, KVCache):
        return
    layers, _, heads, _, size = cache.shape
    if (layers, heads, size) != (config.num_layers, config.cache_heads, config.cache_size):
        raise ConfigError(
            f"cache has {layers} layers of {heads} heads of {size}; the model has {config.num_layers} of "
            f"{config.cache_heads} of {config.cache_size}; make one with its new_cache()"
        )
    if autocast_dtype(cache.device) is None and cache.dtype != weight.dtype:
        raise ConfigError(
            f"cache has dtype {cache.dtype} and the model {weight.dtype}; make one with its new_cache(), under the "
            "same autocast"
        )


def check_context(context: Any, ids_BS: Tensor, *, config: Any, weight: Tensor) -> None:
    """Raise ConfigError unless a value is an `AttentionContext` for these tokens and this model."""
    if not callable(getattr(context, "attend", None)):
        fix = "take it from the cache's begin()"
        raise wrong_type("context", context, "an AttentionContext", fix)
    if not isinstance(context, DenseContext):
        return
    B, S = ids_BS.shape
    if context.visible.num_queries != S:
        raise ConfigError(
            f"context is of {context.visible.num_queries} tokens and ids_BS of {S}; they must be as many; begin() "
            "with these"
        )
    if isinstance(context.cache, KVCache):
        check_cache(context.cache, config=config, weight=weight)
        if context.cache.batch_size != B:
            raise ConfigError(
                f"context is of {context.cache.batch_size} sequences and ids_BS of {B}; they must be as many; begin() "
                "with these"
            )
