"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from one small vector per
token."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.config.latent import LatentAttentionConfig
from expertmesh.models.attention import AttentionContext, apply_rope
from expertmesh.models.layers import RMSNorm
from expertmesh.moe.dense_parts import Linear
from expertmesh.ops.op_set import DEFAULT_OPS, OpSet

LATENT_EPS = 1e-6
"""Epsilon of the norms on the latent vectors, in every model with latent attention."""


class LatentAttention(nn.Module):
    """Causal attention whose cache holds one vector of kv_lora_rank + qk_rope_head_dim numbers per token.

    With c = norm(x W_kv)[:R], R = kv_lora_rank, head h has the key [c K_h, r] and the value c V_h, where r is the
    rotary key that all heads share. Two computations give the same result:

    * plain: compute keys and values of every head, and attend; used for whole sequences.
    * absorbed: [c, r] is the single key of all heads, with scores (q_nope K_h^T) c^T + q_rope r^T; the output is
      (sum p c) V_h. Only c and r are stored and read. Used with a cache, and always with batch-invariant arithmetic, so
      that results have the same bits with and without a cache.
    """

    def __init__(
        self,
        *,
        dim: int,  # model width
        num_heads: int,
        latent: LatentAttentionConfig,  # sizes; `kv_lora_rank` is set
        score_factor: float,  # factor on the scores besides 1 / sqrt(qk_head_dim); see `RopeScalingConfig.score_factor`
        layer_index: int,  # index of this layer in a cache
        arithmetic: OpSet = DEFAULT_OPS,  # op set of all operations in evaluation
        device: torch.device | str | None = None,  # the device of the parameters
        dtype: torch.dtype | None = None,  # the type of the parameters
    ) -> None:
        super().__init__()
        assert latent.kv_lora_rank is not None
        self.num_heads, self.latent, self.layer_index = num_heads, latent, layer_index
        self.num_kv_heads = num_heads
        self.rank, self.score_factor, self.arithmetic = (
            latent.kv_lora_rank,
            score_factor,
            arithmetic,
        )
        how: dict[str, Any] = {"arithmetic": arithmetic, "device": device, "dtype": dtype}
        rows = num_heads * latent.qk_head_dim
        self.q_down: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if latent.q_lora_rank is not None:
            self.q_down = Linear(dim, latent.q_lora_rank, **how)
            self.q_norm = RMSNorm(latent.q_lora_rank, eps=LATENT_EPS, **how)
        self.q_up = Linear(latent.q_lora_rank or dim, rows, **how)
        self.kv_down = Linear(dim, self.rank + latent.qk_rope_head_dim, **how)
        self.kv_norm = RMSNorm(self.rank, eps=LATENT_EPS, **how)
        # rows grouped by head: K_h, then V_h
        self.kv_up = Linear(self.rank, num_heads * (latent.qk_nope_head_dim + latent.v_head_dim), **how)
        self.out = Linear(num_heads * latent.v_head_dim, dim, **how)

    def forward(self, x_BSD: Tensor, *, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
        """Attend; see `expertmesh.models.attention.Attention.forward` for the arguments.

        The tables of cosines and sines have qk_rope_head_dim / 2 columns.
        """
        B, S, _ = x_BSD.shape
        nope, turning = self.latent.qk_nope_head_dim, self.latent.qk_rope_head_dim
        small = x_BSD
        if self.q_down is not None:
            assert self.q_norm is not None
            small = self.q_norm(self.q_down(x_BSD))
        q_THd = self.q_up(small).view(B * S, self.num_heads, nope + turning)
        small_T1d, k_T1d = self.kv_down(x_BSD).view(B * S, 1, -1).split([self.rank, turning], dim=-1)
        half = cos.shape[-1]
        cos, sin = (t.expand(B, -1, half).reshape(-1, 1, half) for t in (cos, sin))
        q_nope, q_turned = q_THd[..., :nope], self._turn(q_THd[..., nope:], cos, sin)
        c_T1d, k_turned = self.kv_norm(small_T1d), self._turn(k_T1d, cos, sin)
        arithmetic = self.arithmetic.in_mode(self.training)
        if arithmetic.batch_invariant or context.keeps:
            y_THd = self._absorbed(q_nope, q_turned, c_T1d, k_turned, context, arithmetic)
        else:
            y_THd = self._plain(q_nope, q_turned, c_T1d, k_turned, context, arithmetic)
        return self.out(y_THd.flatten(1)).view(x_BSD.shape)

    def _turn(self, x_THd: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.latent.interleaved:
            x_THd = x_THd.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return apply_rope(x_THd, cos, sin)

    def _plain(
        self,
        q_plain: Tensor,
        q_turned: Tensor,
        c_T1d: Tensor,
        k_turned: Tensor,
        context: AttentionContext,
        arithmetic: OpSet,
    ) -> Tensor:
        """Attention output (T, H, v_head_dim), computed with keys and values of every head."""
        nope, values = self.latent.qk_nope_head_dim, self.latent.v_head_dim
        kv_THd = self.kv_up(c_T1d).view(len(q_plain), self.num_heads, nope + values)
        k_plain, v_THd = kv_THd.split([nope, values], dim=-1)
        q_THd = torch.cat((q_plain, q_turned), -1) * self.score_factor
        k_THd = torch.cat((k_plain, k_turned.expand(-1, self.num_heads, -1)), -1)
        size = max(q_THd.shape[-1], values)
        if size > q_THd.shape[-1]:  # fused attention needs equal head sizes of queries and values
            q_THd = q_THd * (size / q_THd.shape[-1]) ** 0.5
        q_THd, k_THd, v_THd = (F.pad(t, (0, size - t.shape[-1])) for t in (q_THd, k_THd, v_THd))
        y = context.attend(self.layer_index, q_THd, k_THd, v_THd, arithmetic=arithmetic)
        return y.view(len(q_plain), self.num_heads, size)[..., :values]

    def _absorbed(
        self,
        q_plain: Tensor,
        q_turned: Tensor,
        c_T1d: Tensor,
        k_turned: Tensor,
        context: AttentionContext,
        arithmetic: OpSet,
    ) -> Tensor:
        """Attention output (T, H, v_head_dim), computed with one key for all heads, which is also the value."""
        nope = self.latent.qk_nope_head_dim
        weight = self._up_weight().view(self.num_heads, -1, self.rank)
        q_absorbed = arithmetic.head_linear(q_plain, weight[:, :nope].transpose(1, 2))
        size = self.rank + self.latent.qk_rope_head_dim
        # attention divides by sqrt(size), but the scores need 1 / sqrt(qk_head_dim)
        factor = self.score_factor * (size / self.latent.qk_head_dim) ** 0.5
        q_THd = torch.cat((q_absorbed, q_turned), -1) * factor
        k_T1d = torch.cat((c_T1d, k_turned), -1)
        y = context.attend(self.layer_index, q_THd, k_T1d, k_T1d, arithmetic=arithmetic)
        y_small = y.view(len(q_plain), self.num_heads, size)[..., : self.rank]
        return arithmetic.head_linear(y_small, weight[:, nope:])

    def _up_weight(self) -> Tensor:
        """Weight of `kv_up`, (H * (nope + v), R), with the update of an adapter around it."""
        if type(self.kv_up) is Linear:
            return self.kv_up.weight
        eye = torch.eye(self.rank, dtype=self.kv_norm.weight.dtype, device=self.kv_norm.weight.device)
        product: Tensor = self.kv_up(eye)
        return product.t()
