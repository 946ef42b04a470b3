"""Operations whose result for a row is the same to the bit whatever other rows stand beside it.

Ordinary operators do not promise that. A library's matrix product picks its kernel, and with it the order of its sums,
by the number of rows, and at the edge of a matrix even by the place of a row; a vectorised `exp` may treat the last
elements of a tensor by other code than the rest. Here

* products run over blocks of `BLOCK_ROWS` rows, so that every call has one shape, of matrices whose sizes are multiples
  of 16, and only where a trial has shown that all places of a block give equal results: else row by row
  (on the Triton backend: by our kernel, with tiles that do not depend on the number of rows);
* `exp` and its like run over pieces of one fixed length, below the size at which PyTorch divides work among threads;
* sums along a row are a tree of element-wise additions, and everything else is an addition, a product, a quotient, a
  root or a maximum, each of which is rounded correctly wherever an element lies.

They are slower than the ordinary ones, and differ from them by rounding. `docs/numerics.md` says what is promised.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.ops import triton_linear
from expertmesh.ops.activation import second_branch
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype, gemm_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly

BLOCK_ROWS = 16
"""Rows of every product: more waste time where few tokens come together, fewer do not fill the vector units."""
_ALIGNMENT = 16
"""Elements: narrower edges of a matrix take other code for rows of odd and even number."""
_PIECE = 4096
"""Elements: less than the 32768 from which PyTorch divides element-wise work among threads."""
_TRIALS = 4

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "erf": torch.erf,
    "cos": torch.cos,
    "sin": torch.sin,
    "tanh": torch.tanh,
}


@functools.cache
def _rows_are_alike(
    num_columns: int,
    num_products: int,
    with_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    misalignment: int,
    num_threads: int,
) -> bool:
    """Whether a product of this shape gives a row the same result at every place of a block: tried out once."""
    generator = torch.Generator().manual_seed(num_columns * 65537 + num_products)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    skipped = misalignment // dtype.itemsize
    w_NK = torch.zeros(num_columns * num_products + skipped, device=device, dtype=dtype)[skipped:]
    w_NK = w_NK.view(num_columns, num_products).copy_(draw(num_columns, num_products))
    b_N = draw(num_columns) if with_bias else None
    y_BN = torch.empty(BLOCK_ROWS, num_columns, device=device, dtype=dtype)
    for _ in range(_TRIALS):
        _product(draw(1, num_products).repeat(BLOCK_ROWS, 1), w_NK, b_N, y_BN)
        if not torch.equal(y_BN, y_BN[:1].expand_as(y_BN)):
            return False
    return True


def _product(x: Tensor, w_NK: Tensor, b_N: Tensor | None, out: Tensor) -> None:
    if b_N is None:
        torch.mm(x, w_NK.T, out=out)
    else:
        torch.addmm(b_N, x, w_NK.T, out=out)


@dataclass(frozen=True)
class BlockProduct:
    """One matrix, ready to be multiplied with rows in blocks of one shape; not seen by autograd.

    Attributes:
        w_NK: (N', K') weight with N and K rounded up to multiples of 16.
        b_N: (N',) bias or None.
        num_columns: N.
        x_block: (rows of a block, K'), aligned memory that every block is copied to.
        y_block: (rows of a block, N').
    """

    w_NK: Tensor
    b_N: Tensor | None
    num_columns: int
    x_block: Tensor
    y_block: Tensor

    @staticmethod
    def of(w_NK: Tensor, b_N: Tensor | None = None) -> "BlockProduct":
        """Prepare a weight (N, K) and a bias (N,) of one dtype; copies what is not contiguous or has odd sizes."""
        N, K = w_NK.shape
        more_n, more_k = -N % _ALIGNMENT, -K % _ALIGNMENT
        w_NK = F.pad(w_NK, (0, more_k, 0, more_n)) if more_n or more_k else w_NK.contiguous()
        if b_N is not None:
            b_N = F.pad(b_N, (0, more_n)) if more_n else b_N.contiguous()
        alike = _rows_are_alike(
            *w_NK.shape,
            b_N is not None,
            w_NK.dtype,
            w_NK.device,
            w_NK.data_ptr() % 64,
            torch.get_num_threads(),
        )
        rows = BLOCK_ROWS if alike else 1
        x_block = w_NK.new_zeros(rows, w_NK.shape[1])
        return BlockProduct(w_NK, b_N, N, x_block, w_NK.new_empty(rows, w_NK.shape[0]))

    def into(self, x_RK: Tensor, out_RN: Tensor) -> Tensor:
        """Write x W^T + b of rows (R, K) to (R, N), each of any floating-point type, and return it."""
        size, N, K = self.x_block.shape[0], self.num_columns, x_RK.shape[1]
        for start in range(0, x_RK.shape[0], size):
            rows = x_RK[start : start + size]
            self.x_block[: rows.shape[0], :K].copy_(rows)
            _product(self.x_block, self.w_NK, self.b_N, self.y_block)
            out_RN[start : start + size].copy_(self.y_block[: rows.shape[0], :N])
        return out_RN


def _plain_linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None, backend: str) -> Tensor:
    with without_autocast(x_RK.device):
        if resolve_backend(backend, x_RK.device, x_RK.dtype) == "triton" and (
            x_RK.dtype != torch.float64
        ):
            # all rows are those of one expert
            offsets_E = torch.arange(2, dtype=torch.int32, device=x_RK.device) * x_RK.shape[0]
            b_EN = None if b_N is None else b_N[None]
            return triton_linear.forward(
                x_RK, w_NK[None], offsets_E, b_EN, transposed=False, batch_invariant=True
            )
        dtype = gemm_dtype(x_RK.device, x_RK.dtype)
        block = BlockProduct.of(w_NK.to(dtype), None if b_N is None else b_N.to(dtype))
        return block.into(x_RK, x_RK.new_empty(x_RK.shape[0], w_NK.shape[0]))


_linear = torch.library.custom_op("expertmesh::invariant_linear", _plain_linear, mutates_args=())
_linear.register_fake(lambda x, w, b, backend: x.new_empty(x.shape[0], w.shape[0]))


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _linear_backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:
    x_RK, w_NK = ctx.saved_tensors
    needs = ctx.needs_input_grad
    with without_autocast(x_RK.device):
        return (
            grad_RN @ w_NK if needs[0] else None,
            grad_RN.t() @ x_RK if needs[1] else None,
            grad_RN.sum(0) if needs[2] else None,
            None,
        )


_linear.register_autograd(_linear_backward, setup_context=_save_linear)


def linear(x: Tensor, w_NK: Tensor, b_N: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """x W^T + b, where a row's result does not depend on the other rows or their number.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16. Under autocast all arguments are cast to its type.
        w_NK: (N, K), of x's type.
        b_N: (N,) or None; added before the result is rounded.
        backend: see `resolve_backend`.

    Returns:
        (..., N) in x's type (autocast's). Differentiable; gradients are ordinary sums. Does not synchronise, but for a
        trial at the first call of a shape.
    """
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, w_NK, b_N = x.to(dtype), w_NK.to(dtype), None if b_N is None else b_N.to(dtype)
    run = _plain_linear if runs_plainly(x, w_NK, b_N) else _linear
    y_RN: Tensor = run(x.reshape(-1, x.shape[-1]), w_NK, b_N, backend)
    return y_RN.view(*x.shape[:-1], w_NK.shape[0])


def _plain_pointwise(x: Tensor, name: str) -> Tensor:
    function = _FUNCTIONS[name]
    length = x.numel()
    padded = x.new_zeros(-(-length // _PIECE) * _PIECE)
    padded[:length].copy_(x.reshape(-1))
    pieces = padded.split(_PIECE) if x.device.type == "cpu" else (padded,)
    for piece in pieces:
        function(piece, out=piece)
    # a custom operator may not give out a view of what else it holds
    return padded[:length].view(x.shape).clone(memory_format=torch.contiguous_format)


_pointwise = torch.library.custom_op(
    "expertmesh::invariant_pointwise", _plain_pointwise, mutates_args=()
)
_pointwise.register_fake(lambda x, name: torch.empty_like(x, memory_format=torch.contiguous_format))


def _save_pointwise(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.function_name = inputs[1]


def _pointwise_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    x, y = ctx.saved_tensors
    slopes: dict[str, Callable[[], Tensor]] = {
        "exp": lambda: y,
        "erf": lambda: (-x * x).exp() * (2 / torch.pi**0.5),
        "cos": lambda: -x.sin(),
        "sin": lambda: x.cos(),
        "tanh": lambda: 1 - y * y,
    }
    return grad * slopes[ctx.function_name](), None


_pointwise.register_autograd(_pointwise_backward, setup_context=_save_pointwise)


def pointwise(x: Tensor, name: str) -> Tensor:
    """exp, erf, cos, sin or tanh of FP32 or FP64 elements, whatever their place; differentiable; does not synchronise."""
    y: Tensor = (_plain_pointwise if runs_plainly(x) else _pointwise)(x, name)
    return y


def row_sum(x: Tensor) -> Tensor:
    """Sum along the last axis, (..., n) -> (..., 1): a tree of additions whose shape n alone decides."""
    n = x.shape[-1]
    x = F.pad(x, (0, (1 << max(n - 1, 0).bit_length()) - n))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), FP32 or FP64, without overflow in value or gradient."""
    small = pointwise(torch.where(x >= 0, -x, x), "exp")
    return torch.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: Tensor) -> Tensor:
    """Softmax along the last axis, FP32 or FP64; a row of nothing but -inf gives 0."""
    largest = x.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    e = pointwise(x - largest, "exp")
    return e / row_sum(e).clamp_min(torch.finfo(x.dtype).tiny)


def unit_rows(x: Tensor, *, eps: float) -> Tensor:
    """x / max(|x|, eps) along the last axis: `torch.nn.functional.normalize`."""
    return x / row_sum(x * x).clamp_min(eps * eps).sqrt()  # the root has no slope at 0


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis, in FP32 (FP64 for FP64), rounded to x's type once."""
    dtype = accumulate_dtype(x.dtype)
    wide = x.to(dtype)
    mean = row_sum(wide * wide) / x.shape[-1]
    return (wide / (mean + eps).sqrt() * weight.to(dtype)).to(x.dtype)


def activate(h_RGF: Tensor, inner: str) -> Tensor:
    """Activation of FP32 or FP64 pre-activations (R, G, F) -> (R, F), `inner` as in `ops.activation.inner_name`."""
    gate = h_RGF[:, 0]
    if inner == "silu":
        act = gate / (1.0 + pointwise(-gate, "exp"))
    elif inner == "clamped_silu":
        small = gate.clamp(max=CLAMP_LIMIT)
        act = small / (1.0 + pointwise(-CLAMP_SLOPE * small, "exp"))
    elif inner == "gelu":
        act = 0.5 * gate * (1.0 + pointwise(gate * 0.5**0.5, "erf"))
    else:
        act = gate.clamp_min(0)
        act = act * act if inner == "relu2" else act
    return act if h_RGF.shape[1] == 1 else act * second_branch(h_RGF[:, 1], inner)
