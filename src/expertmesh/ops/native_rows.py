"""Operations along rows on a CPU by the kernels in C (`kernels/cpu/rows.c`): a row has the same bits beside any other
rows.

Sums are FP32. Differentiable any number of times; gradients are PyTorch's ordinary sums.
"""

from typing import Any

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.library import Kernels, loaded
from expertmesh.kernels.cpu.rows_call import KINDS_OF_ROWS, Operation, RowsCall
from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.plain_call import cpu_operator, runs_plainly


def serves(x: Tensor, *weights: Tensor | None) -> bool:
    """Whether `rms_norm` and `norm_and_rope` take these tensors: FP32 or BF16 on a CPU."""
    given = (x, *(w for w in weights if w is not None))
    return all(t.is_cpu and t.dtype in KINDS_OF_ROWS for t in given) and is_loaded()


def sums(x: Tensor) -> bool:
    """Whether `softmax` and `row_sum` take this tensor: FP32 on a CPU."""
    return x.is_cpu and x.dtype == torch.float32 and is_loaded()


def is_loaded() -> bool:
    """Whether the kernels are there."""
    return loaded().kernels is not None


# a graph knows the processor, see `expertmesh.ops.experts.native`
is_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last axis, in x's dtype. `x`: (..., N); `weight`: (N,)."""
    run = _rms_norm if runs_plainly(x, weight) else _rms_norm_operator
    y: Tensor = run(x, weight, eps)
    return y


def norm_and_rope(x_TXYd: Tensor, weight: Tensor | None, *, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RMSNorm over each head, if there is a weight, then the rotation of `models.attention.apply_rope`; rounded
    once.

    Args:
        x_TXYd: (T, X, Y, d) heads in two axes, any strides.
        weight: (d,), or None: no norm.
        cos: (..., d / 2) float32 of P positions; token t has row t mod P.
        sin: the sines, of the shape of cos.

    Returns:
        (T, X * Y, d) in the dtype of x.
    """
    run = _norm_and_rope if runs_plainly(x_TXYd, weight, cos, sin) else _norm_and_rope_operator
    y_THd: Tensor = run(x_TXYd, weight, eps, cos, sin)
    return y_THd


def softmax(x: Tensor) -> Tensor:
    """Softmax along the last axis of FP32; a row of -inf only gives 0."""
    y: Tensor = (_softmax if runs_plainly(x) else _softmax_operator)(x)
    return y


def row_sum(x: Tensor) -> Tensor:
    """Sum along the last axis of FP32, (..., n) -> (..., 1)."""
    y: Tensor = (_row_sum if runs_plainly(x) else _row_sum_operator)(x)
    return y


def _kernels() -> Kernels:
    kernels = loaded().kernels
    if kernels is None:
        raise ConfigError(
            "this graph computes rows by the kernels in C, which are not here; install a C compiler, or export it again"
        )
    return kernels


def _run(operation: Operation, x: Tensor, y: Tensor, **given: Any) -> Tensor:
    """Write the operation on contiguous rows (..., N) to y, and return it."""
    x_R11N = x.contiguous().view(-1, 1, 1, x.shape[-1]) if x.numel() else x.new_empty(0, 1, 1, 1)
    _kernels().rows(RowsCall.of(operation, x_R11N, y, **given), x_R11N, y, *given.values())
    return y


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return _run("rms_norm", x, y, weight=weight.contiguous(), eps=eps)


def _norm_and_rope(x_TXYd: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    T, X, Y, d = x_TXYd.shape
    x_TXYd = x_TXYd if x_TXYd.stride(-1) == 1 else x_TXYd.contiguous()
    y_THd = x_TXYd.new_empty(T, X * Y, d)
    cos, sin = (t.reshape(-1, d // 2).contiguous() for t in (cos, sin))
    weight = None if weight is None else weight.contiguous()
    call = RowsCall.of("rms_norm", x_TXYd, y_THd, weight=weight, eps=eps, cos=cos, sin=sin)
    _kernels().rows(call, x_TXYd, y_THd, weight, cos, sin)
    return y_THd


def _softmax(x: Tensor) -> Tensor:
    return _run("softmax", x, torch.empty_like(x, memory_format=torch.contiguous_format))


def _row_sum(x: Tensor) -> Tensor:
    y = x.new_zeros if x.shape[-1] == 0 else x.new_empty
    return _run("sum", x, y(*x.shape[:-1], 1))


def _norm_gradients(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight; with n = x s: dx = s (g w - n mean(g w n)), dw = sum(g n)."""
    if weight is None:
        return grad.to(x.dtype), None
    with without_autocast(x.device):
        wide, grad = x.float(), grad.float()
        scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        n, g = wide * scale, grad * weight.float()
        dx = scale * (g - n * (g * n).mean(-1, keepdim=True))
        return dx.to(x.dtype), (grad * n).flatten(0, -2).sum(0).to(weight.dtype)


def _rms_norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    return *_norm_gradients(grad, x, weight, ctx.eps), None


def _norm_and_rope_backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor | None, ...]:
    x_TXYd, weight, cos, sin = ctx.saved_tensors
    P, half = cos.numel() // cos.shape[-1], cos.shape[-1]
    first, second = grad_THd.float().view(-1, P, *grad_THd.shape[1:]).chunk(2, dim=-1)
    cos, sin = cos.reshape(P, 1, half), sin.reshape(P, 1, half)
    turned = torch.cat((first * cos + second * sin, second * cos - first * sin), -1)
    return *_norm_gradients(turned.view(x_TXYd.shape), x_TXYd, weight, ctx.eps), None, None, None


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.eps, *tables = inputs
    ctx.save_for_backward(x, weight, *tables)


def _softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return y * (grad - (grad * y).sum(-1, keepdim=True))


_rms_norm_operator = cpu_operator(
    "native_rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _rms_norm,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=_rms_norm_backward,
    save=_save_norm,
)
_norm_and_rope_operator = cpu_operator(
    "native_norm_and_rope(Tensor x_TXYd, Tensor? weight, float eps, Tensor cos, Tensor sin) -> Tensor",
    _norm_and_rope,
    lambda x, *_: x.new_empty(x.shape[0], x.shape[1] * x.shape[2], x.shape[3]),
    backward=_norm_and_rope_backward,
    save=_save_norm,
)
_softmax_operator = cpu_operator(
    "native_softmax(Tensor x) -> Tensor",
    _softmax,
    lambda x: torch.empty_like(x, memory_format=torch.contiguous_format),
    backward=_softmax_backward,
    save=lambda ctx, inputs, output: ctx.save_for_backward(output),
)
_row_sum_operator = cpu_operator(
    "native_row_sum(Tensor x) -> Tensor",
    _row_sum,
    lambda x: x.new_empty(*x.shape[:-1], 1),
    backward=lambda ctx, grad: grad.expand(ctx.shape),
    save=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)
