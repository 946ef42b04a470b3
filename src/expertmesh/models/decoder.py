"""What decoding needs of a model: a language model continues tokens, an encoder-decoder reads sources first.

`expertmesh.engine.lockstep` decodes anything that has these attributes; the `ModelBuilder.decoder` of a family returns one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from expertmesh.models.cache import KVCache
from expertmesh.ops.dtypes import autocast_dtype


class DecodingCache(Protocol):
    """What a model keeps of the tokens that it has seen, all in the model's own hands."""

    length: int
    """Tokens of every sequence so far, padding included."""


@runtime_checkable
class BeamCache(DecodingCache, Protocol):
    """A cache whose rows can go on from one another, for beam search."""

    def branch(self, num_beams: int) -> None:
        """Every row becomes so many neighbouring rows."""

    def reorder(self, rows_R: Tensor) -> None:
        """Row i goes on from what row rows_R[i] was, a row of the same `branch`; (rows,) int64."""


class Translation(NamedTuple):
    """How a text is handed to an encoder-decoder to be written in another language.

    Attributes:
        before: ids in front of the text's tokens.
        after: ids behind them.
        start: ids that every output begins with.
        end_id: that every output ends with.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    start: tuple[int, ...]
    end_id: int


@runtime_checkable
class CausalLM(Protocol):
    """A model that continues sequences of tokens; `expertmesh.models.gpt.model.GPT` is one. All of them are modules."""

    training: bool

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a sequence, new ones included."""

    @property
    def device(self) -> torch.device:
        """Where ids are expected."""

    def new_cache(self, *, batch_size: int, max_len: int) -> Any:
        """An empty `DecodingCache` for so many sequences of so many tokens each, in the type that the model computes in now."""

    def next_logits(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Any) -> Tensor:
        """Read new tokens, keep them in the cache, and give the logits of the token after the last column.

        Args:
            ids_BS: (B, S) int64; the whole prompts at first, padded on the left, then one token of each sequence.
            token_mask_BS: (B, S) bool, False for padding; None: there is none.
            cache: the cache of `new_cache`.

        Returns:
            (B, V), of any floating dtype.
        """

    def train(self, mode: bool = True) -> Any:
        """Set training or evaluation mode."""


@runtime_checkable
class EncoderDecoder(CausalLM, Protocol):
    """A model whose sequences each continue under the eye of a source, which it reads once."""

    @property
    def max_source_len(self) -> int:
        """Most tokens of a source."""

    def encode(self, ids_BS: Tensor, *, token_mask_BS: Tensor | None, cache: Any) -> None:
        """Read the sources and keep in the cache what every later token of the same row looks at.

        Args:
            ids_BS: (B, S) int64, padded on the right.
            token_mask_BS: (B, S) bool, False for padding; None: there is none.
            cache: the cache of `new_cache`, still empty.
        """


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Evaluation mode, whatever it was before; every module's own mode is put back.

    Args:
        model: a module, or what has `training` and `train` as one has.
    """
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
    """What decoding asks of a model of tokens beside its logits: see `CausalLM`."""

    config: Any
    embedding: nn.Embedding
    cache_type: type[KVCache] = KVCache

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        size: int = self.config.vocab_size
        return size

    @property
    def max_seq_len(self) -> int:
        """Most tokens of a sequence that is written."""
        length: int = self.config.max_seq_len
        return length

    @property
    def device(self) -> torch.device:
        """Of the embedding, where ids are expected."""
        return self.embedding.weight.device

    def new_cache(self, *, batch_size: int, max_len: int) -> Any:
        """A cache in the dtype that attention computes in: the parameters', or autocast's where that is on."""
        dtype = autocast_dtype(self.device) or self.embedding.weight.dtype
        return self.cache_type(
            self.config, batch_size=batch_size, max_len=max_len, device=self.device, dtype=dtype
        )
