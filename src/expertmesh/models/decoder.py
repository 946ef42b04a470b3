"""Interfaces of models for decoding: causal language models, encoder-decoders and their caches.

`expertmesh.engine.lockstep` decodes any model with these attributes; the `ModelBuilder.decoder` of a family returns
one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from expertmesh.models.cache import KVCache
from expertmesh.ops.dtypes import autocast_dtype


class DecodingCache(Protocol):
    """State of decoded tokens; its contents are private to the model."""

    length: int
    """Tokens of every sequence so far, padding included."""


@runtime_checkable
class BeamCache(DecodingCache, Protocol):
    """A cache whose rows can be duplicated and reordered, for beam search."""

    def branch(self, num_beams: int) -> None:
        """Repeat every row num_beams times, as neighbouring rows."""

    def reorder(self, rows_R: Tensor) -> None:
        """Replace row i by the old row rows_R[i], a row of the same `branch`; (rows,) int64."""


class Translation(NamedTuple):
    """Special tokens of sources and outputs for translation by an encoder-decoder."""

    before: tuple[int, ...]  # ids before the tokens of a source text
    after: tuple[int, ...]  # ids behind the tokens of a source text
    start: tuple[int, ...]  # ids that every output begins with
    end_id: int  # id that every output ends with


@runtime_checkable
class CausalLM(Protocol):
    """A model that continues sequences of tokens, such as `expertmesh.models.gpt.model.GPT`. All implementations are
    modules."""

    training: bool

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of a sequence, new ones included."""

    @property
    def device(self) -> torch.device:
        """Device that ids must be on."""

    def new_cache(self, *, batch_size: int, max_len: int) -> Any:
        """An empty `DecodingCache` for batch_size sequences of up to max_len tokens, in the current compute dtype."""

    def next_logits(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Any) -> Tensor:
        """Add new tokens to the cache, and return the logits of the token after the last column.

        Args:
            ids_BS: (B, S) int64; first the whole prompts, padded on the left, then one token of each sequence.
            token_mask_BS: (B, S) bool, False for padding; None: there is none.

        Returns:
            (B, V), of any floating dtype.
        """

    def train(self, mode: bool = True) -> Any:
        """Set training or evaluation mode."""


@runtime_checkable
class EncoderDecoder(CausalLM, Protocol):
    """A model whose target sequences attend to a source, which is encoded once."""

    @property
    def max_source_len(self) -> int:
        """Maximum tokens of a source."""

    def encode(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Any) -> None:
        """Encode the sources, and store in the cache the keys and values that target tokens of the same row attend to.

        Args:
            ids_BS: (B, S) int64, padded on the right.
            token_mask_BS: (B, S) bool, False for padding; None: there is none.
        """


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode; every module's own mode is restored on exit."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else [model]
    trained = [module for module in modules if module.training]
    if trained:
        model.train(False)
    try:
        yield
    finally:
        for module in trained:
            module.training = True


class LanguageModel(nn.Module):
    """Base of language models: vocabulary, lengths, device and cache of a `CausalLM`; subclasses compute the logits."""

    config: Any
    embedding: nn.Embedding
    cache_type: type[KVCache] = KVCache

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary; token ids are below it."""
        size: int = self.config.vocab_size
        return size

    @property
    def max_seq_len(self) -> int:
        """Maximum tokens of a generated sequence, its prompt included."""
        length: int = self.config.max_seq_len
        return length

    @property
    def device(self) -> torch.device:
        """Device of the embedding, which ids must be on."""
        return self.embedding.weight.device

    def new_cache(self, *, batch_size: int, max_len: int) -> Any:
        """An empty cache in the dtype that attention computes in: autocast's if it is on, else the parameters'."""
        dtype = autocast_dtype(self.device) or self.embedding.weight.dtype
        return self.cache_type(self.config, batch_size=batch_size, max_len=max_len, device=self.device, dtype=dtype)
