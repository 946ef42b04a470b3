"""Op sets: the implementations of a model's operations, fastest or batch-invariant.

A model selects one by `select_op_set(batch_invariant)` and passes it to its modules. They compute by
`arithmetic.in_mode(self.training)`, because training always uses `TRAINING_OPS`.

Where the kernels in C are the fastest way, their order of sums is the only one: inference in BF16 on a CPU that
multiplies BF16 (`native_linear.is_only_way`) computes the same bits with both op sets.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.ops import native_linear, native_rows
from expertmesh.ops.activation import activate
from expertmesh.ops.attention import dense as dense_attention
from expertmesh.ops.attention import query_blocks as attention_in_blocks
from expertmesh.ops.attention.scores import ScoreRule
from expertmesh.ops.attention.visible import Visible
from expertmesh.ops.cpu import norms, products
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype, without_autocast
from expertmesh.ops.experts.call import ExpertsCall, LowRank, TokenAdapters
from expertmesh.ops.experts.moe_mlp import compute
from expertmesh.ops.experts.weights import ExpertWeights
from expertmesh.ops.invariant import operators as invariant
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.router_linear import router_linear

Adapters = tuple[LowRank | None, LowRank | None]
"""Adapters of the two matrices of a feed-forward block."""
NO_ADAPTERS: Adapters = (None, None)


@dataclass(frozen=True)
class OpSet:
    """Operations that sum along a row, or whose bits may depend on the position of a row.

    Except for the router, `backend` is read with batch_invariant only.

    Attributes:
        norm_and_rope: (x_BSXYd, weight, *, eps, cos, sin) -> (B, S, X * Y, d) heads in two axes, normalised if there is
            a weight, and rotated; None if it does not support the call.
    """

    batch_invariant: bool  # whether a row's result is bitwise the same in every batch
    linear: Callable[..., Tensor]  # (x, w_NK, b_N=None, *, backend="auto") -> x W^T + b
    # (x_TD, w_ED, *, backend) -> (T, E) in FP32 or FP64; see `expertmesh.ops.router_linear`
    router_linear: Callable[..., Tensor]
    softmax: Callable[[Tensor], Tensor]  # softmax along the last axis
    sigmoid: Callable[[Tensor], Tensor]  # the sigmoid of each element
    row_sum: Callable[[Tensor], Tensor]  # sum along the last axis, which is kept with size 1
    unit_rows: Callable[..., Tensor]  # (x, *, eps) -> x / max(|x|, eps) along the last axis
    cos_and_sin: Callable[[Tensor], tuple[Tensor, Tensor]]  # cosine and sine of FP32 or FP64 angles
    # (x, weight, *, eps) -> RMSNorm over the last axis in FP32 (FP64 for FP64), returned in x's dtype
    rms_norm: Callable[..., Tensor]
    norm_and_rope: Callable[..., Tensor | None]
    head_linear: Callable[[Tensor, Tensor], Tensor]  # (x_THn, w_Hmn) -> (T, H, m), each head times its own matrix
    # (q_BHSd, k_BHLd, v_BHLd, visible, rule=None); see `expertmesh.ops.attention.dense.attention`
    attention: Callable[..., Tensor]
    # dense feed-forward block, (T, D) -> (T, D), with `adapters` on its matrices, or adapters of single tokens
    mlp: Callable[..., Tensor]

    def in_mode(self, training: bool) -> "OpSet":
        """Op set of a module in training (True) or in evaluation (False)."""
        return TRAINING_OPS if training else self

    def is_invariant_for(self, x: Tensor) -> bool:
        """Whether experts with adapters compute a row of x the same in every batch: here always, or as the only way."""
        is_inference = self is not TRAINING_OPS and runs_plainly(x)
        return self.batch_invariant or (is_inference and native_linear.is_only_way(x))


def select_op_set(batch_invariant: bool) -> OpSet:
    """Op set of a model with the option `batch_invariant`."""
    return BATCH_INVARIANT_OPS if batch_invariant else DEFAULT_OPS


def _linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    return products.linear(x, w_NK) if b_N is None else F.linear(x, w_NK, b_N)


def _cos_and_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    return angle.cos(), angle.sin()


def _rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if norms.serves(x):
        return norms.rms_norm(x, weight, eps=eps)
    dtype = accumulate_dtype(x.dtype)
    weight = weight.to(dtype)
    return F.rms_norm(x.to(dtype), weight.shape, weight, eps).to(x.dtype)


def _norm_and_rope(x_BSXYd: Tensor, weight: Tensor | None, *, eps: float, cos: Tensor, sin: Tensor) -> Tensor | None:
    if not norms.serves(x_BSXYd) or cos.ndim != 2:
        return None
    return norms.norm_and_rope(x_BSXYd.flatten(2, 3), weight, eps=eps, cos=cos, sin=sin)


def _head_linear(x_THn: Tensor, w_Hmn: Tensor) -> Tensor:
    return torch.einsum("thn,hmn->thm", x_THn, w_Hmn)


def _mlp(
    x_TD: Tensor,
    w_in_GFD: Tensor,
    w_out_DF: Tensor,
    *,
    activation: str,
    b_in_GF: Tensor | None = None,
    b_out_D: Tensor | None = None,
    backend: str = "auto",
    adapters: Adapters = NO_ADAPTERS,
    of_tokens: TokenAdapters | None = None,
) -> Tensor:
    if of_tokens is not None:
        given: dict[str, Any] = {"b_in_GF": b_in_GF, "b_out_D": b_out_D, "activation": activation}
        return _of_one_expert(x_TD, w_in_GFD, w_out_DF, **given, backend=backend, of_tokens=of_tokens)
    b_in = None if b_in_GF is None else b_in_GF.flatten()
    h_TN = _linear(x_TD, w_in_GFD.flatten(0, 1), b_in)
    h_TN = with_adapter(h_TN, x_TD, adapters[0], _linear)
    a_TF = activate(h_TN.unflatten(-1, w_in_GFD.shape[:2]), activation)
    return with_adapter(_linear(a_TF, w_out_DF, b_out_D), a_TF, adapters[1], _linear)


def with_adapter(y: Tensor, x: Tensor, adapter: LowRank | None, linear: Callable[..., Tensor], **how: Any) -> Tensor:
    """Products y (..., N) of rows x (..., K) with one matrix, plus s (x A^T) B^T of its adapter, by a linear operation
    of an op set."""
    if adapter is None:
        return y
    low_nr, b_Nr = low_rank_rows(x, adapter, linear, **how)
    return y + linear(low_nr, b_Nr, **how)


def low_rank_rows(x: Tensor, adapter: LowRank, linear: Callable[..., Tensor], **how: Any) -> tuple[Tensor, Tensor]:
    """s x A^T (..., r) of rows x (..., K), and B (N, r), of the adapter of one matrix."""
    a_rK, b_Nr = (factor[0].to(x.dtype) for factor in (adapter.a_ErK, adapter.b_ENr))
    x = x if adapter.drop is None else adapter.drop(x)
    return linear(x, a_rK, **how) * adapter.scaling, b_Nr


def _of_one_expert(
    x_TD: Tensor,
    w_in_GFD: Tensor,
    w_out_DF: Tensor,
    *,
    activation: str,
    b_in_GF: Tensor | None = None,
    b_out_D: Tensor | None = None,
    backend: str = "auto",
    batch_invariant: bool = False,
    adapters: Adapters = NO_ADAPTERS,
    of_tokens: TokenAdapters | None = None,
) -> Tensor:
    """Compute `_mlp` as a layer with one expert, to which all tokens go with weight 1."""
    experts = ExpertWeights.of(
        w_in_GFD[None],
        w_out_DF[None],
        activation,
        b_in=None if b_in_GF is None else b_in_GF[None],
        b_out=None if b_out_D is None else b_out_D[None],
    )
    T, device = x_TD.shape[0], x_TD.device
    ids_TK = torch.zeros(T, 1, dtype=torch.int64, device=device)
    ones_TK = torch.ones(T, 1, dtype=accumulate_dtype(x_TD.dtype), device=device)
    call = ExpertsCall(x_TD, ones_TK, experts, backend, ids_TK, batch_invariant=batch_invariant)
    given = None if adapters == NO_ADAPTERS else adapters
    return compute(call._replace(adapters=given, of_tokens=of_tokens))


def _invariant_router_linear(x_TD: Tensor, w_ED: Tensor, *, backend: str = "auto") -> Tensor:
    dtype = accumulate_dtype(x_TD.dtype)
    with without_autocast(x_TD.device):
        return invariant.linear(x_TD.to(dtype), w_ED.to(dtype), backend=backend)


def _invariant_cos_and_sin(angle: Tensor) -> tuple[Tensor, Tensor]:
    return invariant.pointwise(angle, "cos"), invariant.pointwise(angle, "sin")


def _invariant_norm_and_rope(
    x_BSXYd: Tensor, weight: Tensor | None, *, eps: float, cos: Tensor, sin: Tensor
) -> Tensor | None:
    if not native_rows.serves(x_BSXYd, weight) or cos.dtype != torch.float32:
        return None
    y_THd = native_rows.norm_and_rope(x_BSXYd.flatten(0, 1), weight, eps=eps, cos=cos, sin=sin)
    return y_THd.unflatten(0, x_BSXYd.shape[:2])


def _by_the_faster(
    own: Callable[..., Any],
    other: Callable[..., Any],
    serves: Callable[..., bool],
    x: Tensor,
    *given: Any,
    **how: Any,
) -> Any:
    """Compute by `own` what it serves without gradients and autocast, else by `other`."""
    tensors = (x, *(t for t in given if isinstance(t, Tensor)))
    is_plain = runs_plainly(*tensors) and autocast_dtype(x.device) is None
    return (own if is_plain and serves(x, *given) else other)(x, *given, **how)


TRAINING_OPS = OpSet(
    batch_invariant=False,
    linear=_linear,
    router_linear=router_linear,
    softmax=partial(torch.softmax, dim=-1),
    sigmoid=torch.sigmoid,
    row_sum=partial(torch.sum, dim=-1, keepdim=True),
    unit_rows=partial(F.normalize, dim=-1),
    cos_and_sin=_cos_and_sin,
    rms_norm=_rms_norm,
    norm_and_rope=_norm_and_rope,
    head_linear=_head_linear,
    attention=dense_attention.attention,
    mlp=_mlp,
)
"""PyTorch's operations; results of a row may depend on the batch."""

BATCH_INVARIANT_OPS = OpSet(
    batch_invariant=True,
    linear=invariant.linear,
    router_linear=_invariant_router_linear,
    softmax=invariant.softmax,
    sigmoid=invariant.sigmoid,
    row_sum=invariant.row_sum,
    unit_rows=invariant.unit_rows,
    cos_and_sin=_invariant_cos_and_sin,
    rms_norm=invariant.rms_norm,
    norm_and_rope=_invariant_norm_and_rope,
    head_linear=invariant.head_linear,
    attention=partial(attention_in_blocks.attention, is_invariant=True),
    mlp=partial(_of_one_expert, batch_invariant=True),
)
"""Batch-invariant implementations: the order of sums depends on the width of a row only; see `docs/numerics.md`,
section 6."""


def _attends_in_one_way(q: Tensor, k: Tensor, v: Tensor, visible: Visible, rule: ScoreRule | None = None) -> bool:
    """Whether a call has one way, see `native_linear.is_only_way`: attention to no later key."""
    return visible.is_causal and native_linear.is_only_way(q, k, v)


def _any(*tensors: Tensor | None) -> bool:
    """Whether an operation is as fast in pieces of one length."""
    return True


_PRODUCTS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("linear", "router_linear", "head_linear", "mlp"), native_linear.is_only_way),
    "attention": _attends_in_one_way,
}
_ROWS: dict[str, Callable[..., bool]] = {
    **dict.fromkeys(("rms_norm", "norm_and_rope"), native_rows.serves),
    **dict.fromkeys(("softmax", "row_sum"), native_rows.sums),
    **dict.fromkeys(("sigmoid", "unit_rows", "cos_and_sin"), _any),
}
"""Operations whose batch-invariant implementation is the fastest for the tensors that a function accepts."""
DEFAULT_OPS = replace(
    TRAINING_OPS,
    **{  # type: ignore[arg-type]
        # no function of a function, which a model could not be pickled with
        name: partial(_by_the_faster, getattr(BATCH_INVARIANT_OPS, name), getattr(TRAINING_OPS, name), serves)
        for name, serves in (_PRODUCTS | _ROWS).items()
    },
)
"""Fastest implementations in evaluation; results of a row may depend on the batch."""
