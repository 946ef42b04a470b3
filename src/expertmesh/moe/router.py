"""Routers: from tokens to logits over the experts. selection.py chooses experts by the logits.

To add one: write an nn.Module whose forward takes x_TD and returns logits_TE (or a RouterOutput), add it to
ROUTERS below, and add its name to RouterKind in config/moe_rules.py.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from expertmesh.moe.dense_parts import Linear
from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.op_set import DEFAULT_OPS, OpSet

_MAX_LOG_SCALE = math.log(100.0)  # a temperature of 0.01 (Swin Transformer V2, section 3.2)


class _FullPrecisionModule(nn.Module):
    """A module whose floating-point tensors stay FP32 (or FP64) when it is cast to a smaller dtype."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "_FullPrecisionModule":
        result: _FullPrecisionModule = super()._apply(keep_full_precision(fn), recurse)
        return result


def keep_full_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Wrap a function for nn.Module._apply so that it moves tensors but never casts them below FP32."""

    def wrapped(t: Tensor) -> Tensor:
        out = fn(t)
        if t.is_floating_point() and torch.finfo(out.dtype).bits < 32:
            return t.to(out.device)
        return out

    return wrapped


class _Projection(Linear):
    """Linear map of a router in full precision."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        arithmetic = self.arithmetic.in_mode(self.training)
        logits = arithmetic.router_linear(x, self.weight, backend=self.backend)
        return logits if self.bias is None else logits + self.bias


class LinearRouter(_FullPrecisionModule):
    """logits = W x, or W x + b.

    The weight is FP32 (FP64 in an FP64 layer) whatever the layer's dtype, and stays so under `.to(torch.bfloat16)`
    and `.half()`, because a rounded router weight changes which expert is chosen.
    """

    def __init__(
        self,
        *,
        dim: int,
        num_experts: int,
        router_bias: bool = False,
        arithmetic: OpSet = DEFAULT_OPS,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        **of_others: Any,
    ) -> None:
        """Make a router; `dtype` is FP32 or FP64. Options of other routers are not read."""
        super().__init__()
        how: dict[str, Any] = {"arithmetic": arithmetic, "backend": backend, "bias": router_bias}
        self.proj = _Projection(dim, num_experts, device=device, dtype=dtype, **how)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> logits (T, E) in FP32, or FP64 for FP64 input."""
        logits_TE: Tensor = self.proj(x_TD)
        return logits_TE


class CosineRouter(_FullPrecisionModule):
    """logits = cos(P x, v_e) * min(exp(s), 100): cosine of a projection with expert embeddings.

    The learnable temperature exp(-s) starts at 0.5 and is kept at 0.01 or above (Tutel's cosine router, and the
    scaled cosine attention of Swin Transformer V2, arXiv 2111.09883, eq. 2).
    """

    def __init__(
        self,
        *,
        dim: int,
        num_experts: int,
        cosine_dim: int,
        arithmetic: OpSet = DEFAULT_OPS,
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        **of_others: Any,
    ) -> None:
        """Make a router that compares in `cosine_dim` dimensions."""
        super().__init__()
        self.arithmetic, self.backend = arithmetic, backend
        how: dict[str, Any] = {"arithmetic": arithmetic, "backend": backend}
        self.proj = _Projection(dim, cosine_dim, device=device, dtype=dtype, **how)
        self.expert_embeddings = nn.Parameter(torch.empty(num_experts, cosine_dim, device=device, dtype=dtype))
        # One axis, because FSDP2 shards no scalars.
        self.log_scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) -> logits (T, E) in FP32, or FP64 for FP64 input."""
        projected = self.proj(x_TD)
        with without_autocast(x_TD.device):
            arithmetic = self.arithmetic.in_mode(self.training)
            token = arithmetic.unit_rows(projected, eps=1e-6)
            expert = F.normalize(self.expert_embeddings.to(token.dtype), dim=-1, eps=1e-6)
            scale = self.log_scale.to(token.dtype).clamp(max=_MAX_LOG_SCALE).exp()
            return arithmetic.router_linear(token, expert, backend=self.backend) * scale


class HashRouter(nn.Module):
    """Router by a keyed hash of the token id; nothing is learned (Roller et al., arXiv 2106.04426).

    The seed of the hash is a persistent buffer, so that a loaded model routes as the saved one did.
    """

    hash_key: Tensor

    def __init__(self, *, device: torch.device | str | None = None, **of_others: Any) -> None:
        """Make a router; `MoELayer.reset_parameters` sets its key. Options of other routers are not read."""
        super().__init__()
        self.register_buffer("hash_key", torch.zeros(2, dtype=torch.int64, device=device))


ROUTERS: dict[str, Callable[..., nn.Module]] = {
    "topk": LinearRouter,
    "expert_choice": LinearRouter,
    "cosine": CosineRouter,
    "hash": HashRouter,
}
