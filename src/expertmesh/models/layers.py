"""What all transformer families here are made of: RMSNorm, rotary positions, grouped-query attention.

The dense feed-forward layer is `expertmesh.moe.experts.DenseMLP`, the same module as a shared expert.
"""

from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.models import masked_attention, row_blocks, short_attention
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.dtypes import accumulate_dtype
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.invariant.attention import attention as invariant_attention


class LayerCache(Protocol):
    """What attention needs of a key-value cache; `expertmesh.models.cache.KVCache` is one."""

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens and return those of all tokens so far."""
        ...


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    Computed in FP32 (FP64 for FP64 input) and returned in the dtype of the input.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        batch_invariant: in evaluation, sum in an order that the width alone decides.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.batch_invariant = eps, batch_invariant
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of x."""
        if self.batch_invariant and not self.training:
            return invariant.rms_norm(x, self.weight, eps=self.eps)
        if row_blocks.serves(x):
            return row_blocks.rms_norm(x, self.weight, eps=self.eps)
        dtype = accumulate_dtype(x.dtype)
        weight = self.weight.to(dtype)
        return F.rms_norm(x.to(dtype), weight.shape, weight, self.eps).to(x.dtype)


class Linear(nn.Linear):
    """`nn.Linear` without bias, on a CPU by its fastest library."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        return cpu_products.linear(x, self.weight)


def rope_tables(
    positions_S: Tensor,
    *,
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    batch_invariant: bool = False,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (Su et al. 2021, eq. 15).

    Pair i of a head turns by position * base^(-2 i / head_dim).

    Args:
        positions_S: (S,) or (B, S) integer positions.
        head_dim: size of one head, even.
        base: base of the frequencies.
        dtype: FP32 or FP64.
        batch_invariant: an entry has the same bits wherever it stands in the table.

    Returns:
        Cosines and sines, each (..., S, head_dim / 2).
    """
    half = torch.arange(0, head_dim, 2, device=positions_S.device, dtype=dtype)
    frequency = torch.pow(base, -half / head_dim)
    angle = positions_S.to(dtype)[..., None] * frequency
    if batch_invariant:
        return invariant.pointwise(angle, "cos"), invariant.pointwise(angle, "sin")
    return angle.cos(), angle.sin()


def apply_rope(x_BHSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (i, i + head_dim / 2) of every head by its position's angle.

    Args:
        x_BHSD: (B, H, S, head_dim) queries or keys.
        cos: (S, head_dim / 2), or (B, 1, S, head_dim / 2).
        sin: like cos.

    Returns:
        The turned x, in its dtype; computed in the dtype of the tables.
    """
    first, second = x_BHSD.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BHSD.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention (Ainslie et al. 2023) with rotary positions.

    One matrix makes queries, keys and values. Its rows are grouped by key-value head: the queries that use the head,
    its key, its value. So a contiguous slice of it is the projection of a slice of the heads.

    Args:
        dim: model width.
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads.
        head_dim: size of one head, even.
        qk_norm: RMSNorm over head_dim on queries and keys, before the rotation.
        norm_eps: its epsilon.
        layer_index: which layer of a cache is this one's.
        batch_invariant: in evaluation a token's result is the same to the bit in every batch.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        qk_norm: bool,
        norm_eps: float,
        layer_index: int,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_index, self.batch_invariant = layer_index, batch_invariant
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = Linear(dim, rows, bias=False, device=device, dtype=dtype)
        self.out = Linear(num_heads * head_dim, dim, bias=False, device=device, dtype=dtype)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if qk_norm:
            norm = partial(
                RMSNorm, eps=norm_eps, batch_invariant=batch_invariant, device=device, dtype=dtype
            )
            self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x_BSD: (B, S, D).
            cos: rotary cosines of the S positions, see `apply_rope`.
            sin: rotary sines.
            mask: boolean, broadcastable to (B, H, S, keys), True where a query may look; None: causal.
            cache: holds the keys and values of earlier tokens; the mask is then needed unless S = 1 or it is empty.

        Returns:
            (B, S, D).
        """
        B, S, _ = x_BSD.shape
        group = self.num_heads // self.num_kv_heads
        invariant_now = self.batch_invariant and not self.training
        linear = invariant.linear if invariant_now else cpu_products.linear
        qkv = linear(x_BSD, self.qkv.weight).view(B, S, self.num_kv_heads, group + 2, self.head_dim)
        q, k, v = (t.flatten(2, 3) for t in qkv.split([group, 1, 1], dim=3))
        q, k = (
            self._norm_and_rope(t, norm, cos, sin)
            for t, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(self.layer_index, k_BHSD=k, v_BHSD=v)
        if invariant_now:
            y = invariant_attention(q, k, v, mask=mask)
            return linear(y.transpose(1, 2).flatten(2), self.out.weight)
        # One new token may look at everything so far, so it needs no mask at all.
        causal = mask is None and S > 1
        if causal and short_attention.serves(q, k):
            y = short_attention.causal_attention(q, k, v)
        elif mask is not None and masked_attention.serves(q, k):
            y = masked_attention.masked_attention(q, k, v, mask)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=group > 1
            )
        return self.out(y.transpose(1, 2).flatten(2))

    def _norm_and_rope(
        self, x_BSHd: Tensor, norm: RMSNorm | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """(B, S, H, head_dim) -> (B, H, S, head_dim), normalised and turned."""
        plain = self.training or not self.batch_invariant
        if plain and row_blocks.serves(x_BSHd) and cos.ndim == 2:
            weight = None if norm is None else norm.weight
            eps = 0.0 if norm is None else norm.eps
            turned = row_blocks.norm_and_rope(x_BSHd, weight, eps=eps, cos=cos, sin=sin)
            return turned.transpose(1, 2)
        x_BHSD = x_BSHd.transpose(1, 2)
        return apply_rope(x_BHSD if norm is None else norm(x_BHSD), cos, sin)
