"""Options of multi-head latent attention and of YaRN, which extends rotary positions to longer contexts."""

import math
from typing import Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config


class LatentAttentionConfig(Config):
    """Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one small vector
    per token."""

    kv_lora_rank: int | None = Field(default=None, gt=0)
    """Rank of the compressed keys and values, which the cache holds; none: ordinary attention."""
    q_lora_rank: int | None = Field(default=None, gt=0)
    """Rank of the compressed queries; none: queries are not compressed."""
    qk_nope_head_dim: int = Field(default=128, gt=0)
    """Dimensions per head of queries and keys without rotary positions."""
    qk_rope_head_dim: int = Field(default=64, gt=0)
    """Rotary dimensions per query head; one rotary key is shared by all heads."""
    v_head_dim: int = Field(default=128, gt=0)
    """Dimensions per head of values."""
    interleaved: bool = True
    """Whether rotary pairs are interleaved, (2 i, 2 i + 1) as in DeepSeek's files, instead of (i, i + qk_rope_head_dim
    / 2)."""

    @property
    def qk_head_dim(self) -> int:
        """Size of each query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.require(
            self.qk_rope_head_dim % 2 == 0,
            "qk_rope_head_dim",
            "must be even, since positions turn pairs",
            "add or take one",
        )
        if self.kv_lora_rank is None:
            for name in type(self).model_fields:
                self.refuse_idle(name, "has no effect without kv_lora_rank", "set kv_lora_rank, or leave it out")
        return self


class RopeScalingConfig(Config):
    """YaRN (Peng et al. 2023): rotary positions of a model that was extended to longer sequences."""

    factor: float = Field(default=1.0, ge=1)
    """Ratio of the new context length to the original one; 1: no YaRN."""
    original_max_seq_len: int = Field(default=4096, gt=0)
    """Original context length in tokens."""
    beta_fast: float = Field(default=32.0, gt=0)
    """Upper end of YaRN's ramp: dimensions with more rotations than this over the original context keep their
    frequency."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Lower end of YaRN's ramp: frequencies of dimensions with fewer rotations than this are divided by `factor`."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor on cosines and sines; none: from mscale and mscale_all_dim where both are set, else 0.1 ln(factor) + 1."""
    mscale: float = Field(default=0.0, ge=0)
    """DeepSeek's factor in the numerator of the attention factor; 0: none."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """DeepSeek's factor in the denominator of the attention factor, and on latent attention's logits; 0: none."""
    truncate: bool = True
    """Whether the ends of YaRN's ramp are rounded to whole dimensions."""

    @property
    def cos_factor(self) -> float:
        """Factor on cosines and sines."""
        if self.factor == 1:
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    @property
    def score_factor(self) -> float:
        """Factor on the scores of latent attention."""
        return self._grown(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def _grown(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def mixed_pairs(self, *, dim: int, base: float) -> tuple[float, float]:
        """(first, last) of the pairs of `dim` turning dimensions whose frequency is mixed; see equation 17 of the
        paper."""

        def pair(turns: float) -> float:
            per_turn = self.original_max_seq_len / (turns * 2 * math.pi)
            return dim * math.log(per_turn) / (2 * math.log(base))

        first, last = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        return max(first, 0), min(last, dim - 1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.factor == 1:
            for name in type(self).model_fields:
                self.refuse_idle(name, "has no effect with factor=1", "raise factor, or leave it out")
        self.require(
            self.beta_slow <= self.beta_fast,
            "beta_slow",
            f"must be at most beta_fast, {self.beta_fast}",
            "lower it",
        )
        return self
