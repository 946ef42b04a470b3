"""Text as the data of a language model's run: windows of tokens, and the bytes that validation tokens stand for."""

from collections.abc import Iterator

import torch
from torch import Tensor

from expertmesh.config.text import TextConfig
from expertmesh.data.shards import prepare_tokens
from expertmesh.data.tokenizer import load_tokenizer, token_num_bytes
from expertmesh.data.windows import Windows


class TextData:
    """Tokens of a corpus in windows of S; finds the corpus, and fills the cache unless it has the tokens.

    Args:
        config: of the data.
        vocab_size: V of the model.
        seed: of the order of the windows.

    Raises:
        ConfigError: the corpus is missing, not text, or shorter than one sequence on a side.
        OSError: the cache cannot be written.

    Attributes:
        corpus: the documents themselves.
        windows: of the training split.
    """

    def __init__(self, config: TextConfig, *, vocab_size: int, seed: int) -> None:
        tokens = prepare_tokens(config, vocab_size=vocab_size)
        self.key, self.corpus = tokens.key, tokens.corpus
        self.files = {"tokenizer.json": tokens.tokenizer_path}
        self.windows = Windows(tokens.training.tokens_N, config.seq_len, seed)
        self._validation = Windows(tokens.validation.tokens_N, config.seq_len, seed)
        sizes = token_num_bytes(load_tokenizer(tokens.tokenizer_path), vocab_size)
        self._num_bytes_V = torch.from_numpy(sizes)
        self.description = (
            f"{tokens.corpus.source}: {len(tokens.training.tokens_N):,} training and "
            f"{len(tokens.validation.tokens_N):,} validation tokens"
        )

    def batch(self, first_sample: int, num_samples: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (num_samples, S) int64."""
        return self.windows.batch(first_sample, num_samples)

    @property
    def num_validation(self) -> int:
        """Validation samples."""
        return self._validation.num_windows

    def validation(
        self, max_samples: int | None, batch_size: int
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Inputs, targets, and the bytes that each target stands for, (B, S) int64; each window from its own beginning."""
        for ids_BS, targets_BS in self._validation.batches(max_samples, batch_size):
            yield ids_BS, targets_BS, self._num_bytes_V[targets_BS]
