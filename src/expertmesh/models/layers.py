"""What all transformer families here are made of: RMSNorm, rotary positions, grouped-query attention.

The dense feed-forward layer is `expertmesh.moe.experts.DenseMLP`, the same module as a shared expert.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.config.model import MoEConfig
from expertmesh.models.cache import KVCache
from expertmesh.moe.dense_parts import Linear
from expertmesh.moe.experts import DenseMLP
from expertmesh.moe.init import init_normal_
from expertmesh.moe.layer import MoELayer
from expertmesh.moe.types import RoutingStats
from expertmesh.ops.dtypes import autocast_dtype
from expertmesh.ops.row_arithmetic import ORDINARY, RowArithmetic


class LayerCache(Protocol):
    """What attention needs of a key-value cache; `expertmesh.models.cache.KVCache` is one."""

    def update(self, layer_index: int, *, k_BHSD: Tensor, v_BHSD: Tensor) -> tuple[Tensor, Tensor]:
        """Store the keys and values of new tokens and return those of all tokens so far."""


def draw_weights(model: Any, *, device: torch.device | str | None, seed: int | None) -> None:
    """Give a model that was built on "meta" memory and its initial weights, each drawn once; on "meta" nothing.

    Args:
        model: as it was built.
        device: of the parameters; None: torch's default.
        seed: None: a fresh one from torch's default generator.
    """
    target = torch.get_default_device() if device is None else torch.device(device)
    if target.type != "meta":
        model.to_empty(device=target)
        model.init_weights(seed)


def init_transformer(
    model: nn.Module, *, seed: int, std: float, out_std: Callable[[str], float]
) -> None:
    """Draw every parameter anew: N(0, std^2), norms 1, biases 0; those of MoE layers by their own rules.

    The numbers depend on the seed and the parameter's name only, not on the device or the number of ranks.

    Args:
        model: its MoE layers are called `moe`, its norms `...norm`, and its projections back to the residual stream
            `...attention.out` and `...ffn.w_out`.
        seed: of the whole model.
        std: standard deviation of all but those projections.
        out_std: returns that of such a projection, or of those in a MoE layer, from its name.
    """
    for name, module in model.named_modules():
        if isinstance(module, MoELayer):
            module.reset_parameters(seed, std=std, out_std=out_std(name))
    for name, parameter in model.named_parameters():
        if ".moe." in name:
            continue
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        else:
            returns = name.endswith(("attention.out.weight", "ffn.w_out"))
            this_std = out_std(name) if returns else std
            init_normal_(parameter, std=this_std, seed=seed, name=name, per_expert=False)


class LanguageModel(nn.Module):
    """What decoding asks of a model of tokens beside its logits: see `expertmesh.models.decoder.CausalLM`."""

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


class FeedForward(nn.Module):
    """A block of a transformer whose feed-forward layer has experts, as `moe`, or is dense, as `ffn`."""

    moe: MoELayer | None
    ffn: DenseMLP | None

    def make_feed_forward(
        self,
        moe: MoEConfig,
        num_experts: int,
        *,
        dim: int,
        hidden_dim: int,
        activation: str,
        layer_index: int,
        bias: bool = False,
        arithmetic: RowArithmetic = ORDINARY,
        **place: Any,
    ) -> None:
        """Make the layer.

        Args:
            moe: options of a layer with experts.
            num_experts: its experts; 0: it is dense.
            dim: model width.
            hidden_dim: hidden size of a dense layer, and of the residual MLP beside experts.
            activation: of experts and of a dense layer.
            layer_index: which layer of the model this is.
            bias: whether a dense layer has biases.
            arithmetic: of a dense layer in evaluation.
            **place: device and dtype of the parameters.
        """
        self.moe = self.ffn = None
        if num_experts:
            self.moe = MoELayer.from_config(
                moe,
                dim=dim,
                num_experts=num_experts,
                activation=activation,
                residual_hidden_dim=hidden_dim,
                layer_index=layer_index,
                **place,
            )
        else:
            self.ffn = DenseMLP(
                dim=dim,
                hidden_dim=hidden_dim,
                activation=activation,
                bias=bias,
                arithmetic=arithmetic,
                **place,
            )

    def feed_forward(self, x_TD: Tensor, **call: Any) -> tuple[Tensor, RoutingStats | None]:
        """(T, D) -> (T, D), and the routing statistics of a layer with experts, which `call` is for."""
        if self.moe is not None:
            y_TD, stats = self.moe(x_TD, **call)
            return y_TD, stats
        assert self.ffn is not None
        return self.ffn(x_TD), None


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang and Sennrich 2019, eq. 4).

    Computed in FP32 (FP64 for FP64 input) and returned in the dtype of the input.

    Args:
        dim: size of the last axis.
        eps: added to the mean square.
        arithmetic: the arithmetic of the norm in evaluation.
        device: the device of the weight.
        dtype: the type of the weight.
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float,
        arithmetic: RowArithmetic = ORDINARY,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.arithmetic = eps, arithmetic
        self.weight = nn.Parameter(torch.ones(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., dim) in the dtype of x."""
        return self.arithmetic.in_mode(self.training).rms_norm(x, self.weight, eps=self.eps)


def rope_tables(
    positions_S: Tensor,
    *,
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    fraction: float = 1.0,
    arithmetic: RowArithmetic = ORDINARY,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary position embedding (Su et al. 2021, eq. 15).

    Pair i of a head turns by position * base^(-2 i / (fraction * head_dim)), and the pairs behind that fraction not at all.

    Args:
        positions_S: (S,) or (B, S) integer positions.
        head_dim: size of one head, even.
        base: base of the frequencies.
        dtype: FP32 or FP64.
        fraction: share of the pairs that turn.
        arithmetic: the arithmetic of the cosines and sines.

    Returns:
        Cosines and sines, each (..., S, head_dim / 2).
    """
    turning = round(head_dim * fraction)
    half = torch.arange(0, turning, 2, device=positions_S.device, dtype=dtype)
    frequency = torch.pow(base, -half / max(turning, 1))
    frequency = F.pad(frequency, (0, (head_dim - turning) // 2))
    angle = positions_S.to(dtype)[..., None] * frequency
    return arithmetic.cos_and_sin(angle)


def apply_rope(x_BHSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pair (i, i + head_dim / 2) of every head by its position's angle.

    Args:
        x_BHSD: (B, H, S, head_dim) queries or keys.
        cos: (S, head_dim / 2), or (B, 1, S, head_dim / 2).
        sin: the sines, of the shape of cos.

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
        qk_norm: RMSNorm on queries and keys, before the rotation.
        norm_eps: the epsilon of that norm.
        layer_index: which layer of a cache is this one's.
        qk_norm_scope: whether that norm is over each "head", or over all queries (keys) of a token, the "projection".
        qkv_bias: whether queries, keys and values have biases.
        arithmetic: the arithmetic of everything in evaluation.
        device: the device of the parameters.
        dtype: the type of the parameters.
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
        qk_norm_scope: Literal["head", "projection"] = "head",
        qkv_bias: bool = False,
        arithmetic: RowArithmetic = ORDINARY,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_index, self.arithmetic = layer_index, arithmetic
        rows = (num_heads + 2 * num_kv_heads) * head_dim
        how: dict[str, Any] = {"arithmetic": arithmetic, "device": device, "dtype": dtype}
        self.qkv = Linear(dim, rows, bias=qkv_bias, **how)
        self.out = Linear(num_heads * head_dim, dim, **how)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_heads = qk_norm_scope == "head"
        if qk_norm:
            sizes = (1, 1) if self.norms_heads else (num_heads, num_kv_heads)
            self.q_norm, self.k_norm = (
                RMSNorm(size * head_dim, eps=norm_eps, **how) for size in sizes
            )

    def forward(
        self,
        x_BSD: Tensor,
        *,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        cache: LayerCache | None = None,
        places: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x_BSD: (B, S, D).
            cos: rotary cosines of the S positions, see `apply_rope`.
            sin: rotary sines of the same positions.
            mask: boolean, broadcastable to (B, H, S, keys), True where a query may look; None: causal.
            cache: holds the keys and values of earlier tokens; the mask is then needed unless S = 1 or it is empty.
            places: (H, S, head_dim) queries and (H, keys, head_dim) keys of places, whose scores are added to those of the
                tokens, both over sqrt(2 head_dim) (Ke et al. 2021, eq. 7); as many key heads as query heads. None: there are none.

        Returns:
            (B, S, D).
        """
        B, S, _ = x_BSD.shape
        group = self.num_heads // self.num_kv_heads
        qkv = self.qkv(x_BSD).view(B, S, self.num_kv_heads, group + 2, self.head_dim)
        q, k, v = (t.flatten(2, 3) for t in qkv.split([group, 1, 1], dim=3))
        q, k = (
            self._norm_and_rope(t, norm, cos, sin)
            for t, norm in ((q, self.q_norm), (k, self.k_norm))
        )
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(self.layer_index, k_BHSD=k, v_BHSD=v)
        if (
            places is not None
        ):  # one product gives the sum of both, and its usual scale is sqrt(2 head_dim)
            q, k = (
                torch.cat((t, own.to(t.dtype).expand(len(t), -1, -1, -1)), -1)
                for t, own in zip((q, k), places, strict=True)
            )
            v = F.pad(v, (0, self.head_dim))
        y = self.arithmetic.in_mode(self.training).attention(q, k, v, mask=mask)
        if places is not None:
            y = y[..., : self.head_dim]
        return self.out(y.transpose(1, 2).flatten(2))

    def _norm_and_rope(
        self, x_BSHd: Tensor, norm: RMSNorm | None, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """(B, S, H, head_dim) -> (B, H, S, head_dim), normalised and turned."""
        if norm is not None and not self.norms_heads:
            x_BSHd, norm = norm(x_BSHd.flatten(2)).view(x_BSHd.shape), None
        elif norm is not None and norm.weight.is_meta:  # on disk until it is called
            x_BSHd, norm = norm(x_BSHd), None
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        turned = self.arithmetic.in_mode(self.training).norm_and_rope(
            x_BSHd, weight, eps=eps, cos=cos, sin=sin
        )
        if turned is not None:
            return turned.transpose(1, 2)
        x_BHSD = x_BSHd.transpose(1, 2)
        return apply_rope(x_BHSD if norm is None else norm(x_BHSD), cos, sin)
