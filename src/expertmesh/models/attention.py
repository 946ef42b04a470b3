"""Attention of all transformer families here, and the context object that decides which keys a query sees.

An attention layer computes queries, keys and values of its tokens and passes them to an `AttentionContext`. Dense
training, padding, documents, caches and paged caches are implementations of this protocol, and layers do not
distinguish them.
"""

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.config.latent import RopeScalingConfig
from expertmesh.models.layers import RMSNorm
from expertmesh.moe.dense_parts import Linear
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible, visible
from expertmesh.ops.op_set import DEFAULT_OPS, OpSet

Places = tuple[Tensor, Tensor]
"""Untied positions: (H, S, head_dim) queries and (H, keys, head_dim) keys, shared by all layers of an encoder or
decoder."""


class AttentionContext(Protocol):
    """Attention of one forward pass: positions of its tokens, earlier keys, and which keys each query sees."""

    @property
    def positions(self) -> Tensor:
        """Integer positions of the tokens in their sequences, (S,) or (B, S), or (T,) of flat tokens."""

    @property
    def keeps(self) -> bool:
        """Whether keys and values are kept for later tokens, which makes compact ones worthwhile (latent attention)."""

    def attend(
        self,
        layer_index: int,  # index of the calling layer, from 0
        q_THd: Tensor,  # (T, H, head_dim) rotated queries, in the order of the tokens
        k_Thd: Tensor,  # (T, heads, head_dim) rotated keys; heads divides H
        v_Thd: Tensor,  # (T, heads, head_dim) values
        *,
        arithmetic: OpSet,  # the operations of the module in its mode
        rule: ScoreRule | None = None,  # the window, the cap and the sinks of the layer; None: it has none
    ) -> Tensor:
        """Store the keys and values of these tokens, and attend with their queries to all keys that they see.

        Returns:
            (T, H * head_dim), or (B, S, H * head_dim).
        """


class LayerCache(Protocol):
    """Key-value cache that returns contiguous keys and values, such as `expertmesh.models.cache.KVCache`."""

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens, and return the keys and values of all tokens so far."""


@dataclass(frozen=True)
class DenseContext:
    """Context of a dense batch, B sequences of S tokens each; a pytree.

    Attributes:
        places: queries and keys of untied positions. Their scores are added to the token scores, both divided by sqrt(2
            head_dim) (Ke et al. 2021, eq. 7); as many key heads as query heads. None: positions are rotary.
    """

    positions: Tensor  # (S,) columns, or (B, S) counted from each sequence's own first token
    visible: Visible  # keys that the tokens see
    cache: LayerCache | None = None  # earlier keys and values, to which new ones are added; None: there are none
    places: Places | None = None

    @property
    def keeps(self) -> bool:
        """Whether there is a cache."""
        return self.cache is not None

    @classmethod
    def of(
        cls,
        num_new: int,  # S, tokens of each sequence in this pass
        *,
        device: torch.device,  # the device of the tokens
        num_seen: int = 0,  # tokens of each sequence in the cache, padding included
        is_token_BL: Tensor | None = None,  # (B, num_seen + S) bool, False for padding; None: there is none
        document_BS: Tensor | None = None,
        cache: LayerCache | None = None,  # earlier keys and values
        counts_padding: bool = True,
    ) -> "DenseContext":
        """Context of causal attention; does not synchronise with the device.

        Args:
            document_BS: (B, S) document numbers: tokens see only tokens with the same number; None: all.
            counts_padding: whether positions are columns; else they begin at each sequence's own first token, so that
                padding before it does not change a single bit.
        """
        end = num_seen + num_new
        seen = visible(num_new, end, device=device, is_token_BL=is_token_BL, document_BS=document_BS)
        positions = torch.arange(num_seen, end, device=device)
        if not counts_padding and seen.first_B is not None:
            positions = (positions - seen.first_B[:, None]).clamp(min=0)
        return cls(positions, seen, cache)

    def attend(
        self,
        layer_index: int,
        q_THd: Tensor,
        k_Thd: Tensor,
        v_Thd: Tensor,
        *,
        arithmetic: OpSet,
        rule: ScoreRule | None = None,
    ) -> Tensor:
        """See `AttentionContext.attend`."""
        S, head_dim = self.visible.num_queries, q_THd.shape[-1]
        B = q_THd.shape[0] // S  # a rank may have no row at all
        q, k, v = (t.unflatten(0, (B, S)).transpose(1, 2) for t in (q_THd, k_Thd, v_Thd))
        if self.cache is not None:
            k, v = self.cache.update(layer_index, k_BHSD=k, v_BHSD=v)
        if self.places is not None:
            # concatenated heads give the sum of both scores in one product, whose scale is 1 / sqrt(2 head_dim)
            q, k = (
                torch.cat((t, own.to(t.dtype).expand(len(t), -1, -1, -1)), -1)
                for t, own in zip((q, k), self.places, strict=True)
            )
            v = F.pad(v, (0, head_dim))
        y = arithmetic.attention(q, k, v, self.visible, rule)
        return y[..., :head_dim].transpose(1, 2).flatten(2)


torch.utils._pytree.register_dataclass(
    DenseContext, field_names=["positions", "visible", "cache", "places"], drop_field_names=[]
)


def rope_tables(
    positions_S: Tensor,  # (S,) or (B, S) integer positions, or of any other shape
    *,
    head_dim: int,  # size of one head, even
    base: float,  # base of the frequencies
    dtype: torch.dtype,  # FP32 or FP64
    fraction: float = 1.0,  # fraction of the pairs that are rotated
    scaling: RopeScalingConfig | None = None,  # scaling to longer contexts; None: none
    arithmetic: OpSet = DEFAULT_OPS,  # op set that computes the cosines and sines
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (Su et al. 2021, eq. 15).

    Pair i of a head is rotated by position * base^(-2 i / (fraction * head_dim)). Pairs beyond that fraction are not
    rotated and not scaled.

    Returns:
        Cosines and sines, each (..., S, head_dim / 2).
    """
    turning = round(head_dim * fraction)
    half = torch.arange(0, turning, 2, device=positions_S.device, dtype=dtype)
    frequency = torch.pow(base, -half / max(turning, 1))
    if scaling is not None and scaling.factor > 1:
        first, last = scaling.mixed_pairs(dim=turning, base=base)
        pair = torch.arange(turning // 2, device=positions_S.device, dtype=dtype)
        share = ((pair - first) / max(last - first, 1e-3)).clamp(0, 1)
        frequency = frequency * (1 - share) + frequency / scaling.factor * share
    angle = positions_S.to(dtype)[..., None] * frequency
    cos, sin = arithmetic.cos_and_sin(angle)
    if scaling is not None and scaling.cos_factor != 1:
        cos, sin = cos * scaling.cos_factor, sin * scaling.cos_factor
    if turning == head_dim:
        return cos, sin
    still = (0, (head_dim - turning) // 2)
    return F.pad(cos, still, value=1.0), F.pad(sin, still)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, i + head_dim / 2) of every head by the angle of its position.

    Args:
        x: (..., head_dim) queries or keys.
        cos: (..., head_dim / 2), broadcastable to x: of (B, S, H, head_dim), tables of (S, 1, head_dim / 2) or (B, S,
            1, head_dim / 2).
        sin: the sines, of the shape of cos.

    Returns:
        The rotated x, in its dtype; computed in the dtype of the tables.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions.

    One matrix projects to queries, keys and values. Its rows are grouped by key-value head: the queries that use the
    head, then its key, then its value. A contiguous slice of the matrix is therefore the projection of a slice of the
    heads.

    Args:
        qk_norm_scope: normalised axis: each "head", or all queries (keys) of a token, the "projection".
    """

    def __init__(
        self,
        *,
        dim: int,  # model width
        num_heads: int,  # query heads
        num_kv_heads: int,  # key and value heads, a divisor of num_heads
        head_dim: int,  # size of one head, even
        qk_norm: bool,  # RMSNorm on queries and keys, before the rotation
        norm_eps: float,  # epsilon of the query and key norms
        layer_index: int,  # index of this layer in a cache
        qk_norm_scope: Literal["head", "projection"] = "head",
        qkv_bias: bool = False,  # whether queries, keys and values have biases
        out_bias: bool = False,  # whether the output projection has one
        sinks: bool = False,  # whether each query head has a learned score without a value; see `ScoreRule`
        window: int | None = None,  # maximum number of tokens that a token sees, itself included; None: all before it
        arithmetic: OpSet = DEFAULT_OPS,  # op set of all operations in evaluation
        device: torch.device | str | None = None,  # the device of the parameters
        dtype: torch.dtype | None = None,  # the type of the parameters
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_index, self.arithmetic = layer_index, arithmetic
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        how: dict[str, Any] = {"arithmetic": arithmetic, "device": device, "dtype": dtype}
        self.window = window
        empty = torch.zeros(num_heads, device=device, dtype=dtype) if sinks else None
        self.sinks = None if empty is None else nn.Parameter(empty)
        self.qkv = Linear(dim, rows, bias=qkv_bias, **how)
        self.out = Linear(num_heads * head_dim, dim, bias=out_bias, **how)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_heads = qk_norm_scope == "head"
        if qk_norm:
            sizes = (1, 1) if self.norms_heads else (num_heads, num_kv_heads)
            self.q_norm, self.k_norm = (RMSNorm(size * head_dim, eps=norm_eps, **how) for size in sizes)

    def forward(self, x_BSD: Tensor, *, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """Attend to the keys that the context makes visible.

        Args:
            x_BSD: (B, S, D), or (1, T, D) flat tokens.
            cos: (S, head_dim / 2) or (B, S, head_dim / 2) rotary cosines of the positions, see `rope_tables`.
            context: the context, which stores new keys and values and decides which keys these tokens see.

        Returns:
            (B, S, D).
        """
        B, S, _ = x_BSD.shape
        group = self.num_heads // self.num_kv_heads
        qkv = self.qkv(x_BSD).view(B * S, self.num_kv_heads, group + 2, self.head_dim)
        q, k, v = qkv.split([group, 1, 1], dim=2)
        q_THd, k_Thd = (
            self._norm_and_rope(t, norm, cos, sin, rows=(B, S)) for t, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        v_Thd, arithmetic = v.flatten(1, 2), self.arithmetic.in_mode(self.training)
        call: dict[str, Any] = {"arithmetic": arithmetic}
        if self.sinks is not None or self.window is not None:
            call["rule"] = ScoreRule(window=self.window, sinks_H=self.sinks)
        y = context.attend(self.layer_index, q_THd, k_Thd, v_Thd, **call)
        return self.out(y).view(x_BSD.shape)

    def _norm_and_rope(
        self,
        x: Tensor,
        norm: RMSNorm | None,
        cos: Tensor,
        sin: Tensor,
        *,
        rows: tuple[int, int],
    ) -> Tensor:
        """Queries or keys (T, heads, group, head_dim), normalised and rotated: (T, H, head_dim); T = B * S with rows =
        (B, S)."""
        if norm is not None and not self.norms_heads:
            x, norm = norm(x.flatten(1)).view(x.shape), None
        elif norm is not None and norm.weight.is_meta:  # offloaded to disk until it is called
            x, norm = norm(x), None
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        turned = self.arithmetic.in_mode(self.training).norm_and_rope(
            x.unflatten(0, rows), weight, eps=eps, cos=cos, sin=sin
        )
        if turned is not None:
            return turned.flatten(0, 1)
        x_THd = (x if norm is None else norm(x)).flatten(1, 2)
        half = cos.shape[-1]
        cos, sin = (t.expand(rows[0], -1, half).reshape(-1, 1, half) for t in (cos, sin))
        return apply_rope(x_THd, cos, sin)
