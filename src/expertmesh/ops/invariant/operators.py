"""Batch-invariant operations: the result of a row is bitwise the same whatever other rows are in the call.

Ordinary operators do not guarantee this. A library's matrix product selects its kernel, and so the order of its sums,
by the number of rows, and at the edge of a matrix even by a row's position. A vectorised `exp` may use other code for
the last elements of a tensor. Here

* products on a CPU are the native kernels' (`kernels/cpu`), whose order of sums never depends on the number of rows;
* where there are none, products run in calls of few rows, with matrix sizes that are multiples of 16. A trial finds the
  numbers of rows with equal results at all positions; other calls are padded, or run row by row. (Triton: our kernel,
  with fixed tiles);
* `exp` and other point-wise functions run over pieces of one fixed length, which PyTorch does not divide among threads;
* sums along a row are PyTorch's, with as few elements, if a trial has shown that other rows do not matter; otherwise a
  tree of additions. Additions, products, quotients, roots and maxima are rounded correctly at every position.

They are slower than the ordinary operators, and differ from them by rounding. `docs/numerics.md` states the guarantees.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from expertmesh.config.moe_rules import CLAMP_LIMIT, CLAMP_SLOPE
from expertmesh.ops import native_linear, native_rows, triton_linear
from expertmesh.ops.activation import second_branch
from expertmesh.ops.backend import uses_triton
from expertmesh.ops.check import wrong_shape
from expertmesh.ops.dtypes import accumulate_dtype, autocast_dtype, gemm_dtype, without_autocast
from expertmesh.ops.plain_call import runs_plainly

BLOCK_ROWS = 16
"""Number of rows for which a product's results are tested, and the maximum of a call, except for `LARGE_BLOCK_ROWS`."""
LARGE_BLOCK_ROWS = 64
"""Number of rows of a call if there are enough."""
_ALIGNMENT = 16
"""Divisor of matrix sizes, in elements: with narrower edges, odd and even numbers of rows take different code."""
_BYTES = 64
"""Alignment of every operand of a product, in bytes: at other addresses a library may sum in another order."""
_PIECE = 4096
"""Elements of a piece, fewer than the 32768 from which PyTorch divides element-wise work among threads."""
_MOST_SUMMED = 32767
"""Maximum number of elements of a row-sum call: PyTorch divides more among threads."""
_MOST_ROWS_SUMMED = 256
"""Maximum number of rows of a row-sum call; every smaller number is tested too."""
_BATCHES = (64, 32, 16, 8, 4, 2, 1)
"""Numbers of matrices of a batched-product call; all of these are tested."""
_TRIALS = 3
_SHIFT = 5
"""Shift between the two halves of cancelling products, so that no order of sums cancels exactly."""

_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "erf": torch.erf,
    "cos": torch.cos,
    "sin": torch.sin,
    "tanh": torch.tanh,
}


class RowRange(NamedTuple):
    """Numbers of rows of a product call with which a row gets the same result in every call."""

    least: int  # minimum number of rows; fewer are padded. 0: results depend on the position, so rows run one by one.
    most: int  # calls have up to `BLOCK_ROWS` rows, or exactly this many

    def calls(self, num_rows: int) -> Iterator[tuple[slice, int]]:
        """Split rows into calls: the slice of rows of each call, and its padded number of rows."""
        start = 0
        while start < num_rows:
            left = num_rows - start
            size = self.most if left >= self.most else min(left, BLOCK_ROWS) if self.least else 1
            yield slice(start, start + size), max(size, self.least)
            start += size


ONE_BY_ONE = RowRange(0, 1)


def _doubled(t: Tensor, sign: int) -> Tensor:
    """Replace the second half of the last axis by the first half, shifted and multiplied by a sign.

    The product of rows with sign -1 and columns with sign 1 is 0 up to rounding, which depends on the order of the
    sums. Differences in that order are thus visible even in results rounded to 8 bits.
    """
    half = t[..., : t.shape[-1] // 2]
    return torch.cat([half, sign * half.roll(_SHIFT, -1)], -1)


def _tried(product: Callable[[Tensor], Tensor], normal: Callable[[int], Tensor]) -> RowRange:
    """Find the calls of a product that give a row the same result, by trials with ordinary and with cancelling rows."""
    least, most = 1, LARGE_BLOCK_ROWS
    for trial in range(_TRIALS):

        def draw(count: int, cancels: bool = trial > 0) -> Tensor:
            return _doubled(normal(count), -1) if cancels else normal(count)

        alike = product(draw(1).repeat(BLOCK_ROWS, 1))
        if not torch.equal(alike, alike[:1].expand_as(alike)):
            return ONE_BY_ONE
        x_RK = draw(LARGE_BLOCK_ROWS)
        blocks = [product(rows) for rows in x_RK.split(BLOCK_ROWS)]
        if not torch.equal(product(x_RK), torch.cat(blocks)):
            most = BLOCK_ROWS
        for count in range(BLOCK_ROWS - 1, least - 1, -1):
            if not torch.equal(product(x_RK[:count]), blocks[0][:count]):
                least = count + 1
                break
    return RowRange(least, most)


def _drawing(num: int, like: Tensor) -> Callable[..., Tensor]:
    """Function that draws normal numbers in the dtype and on the device of a tensor; `num` is the seed."""
    generator = torch.Generator().manual_seed(num)
    # drawn in FP64: FP64 sums of numbers drawn in a narrower dtype would not round
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(like)


@functools.cache
def _rows_of(
    num_columns: int,
    num_products: int,
    with_bias: bool,
    dtype: torch.dtype,
    device: torch.device,
    misalignment: int,
    num_threads: int,
) -> RowRange:
    """Numbers of rows of calls of a product of this shape; tested once."""
    skipped = misalignment // dtype.itemsize
    w_NK = torch.zeros(num_columns * num_products + skipped, device=device, dtype=dtype)[skipped:]
    draw = _drawing(num_columns * 65537 + num_products, w_NK)
    w_NK = w_NK.view(num_columns, num_products)
    w_NK.copy_(_doubled(draw(num_columns, num_products), 1))
    # as small as the remainders of cancelling rows
    b_N = draw(num_columns) * 2**-20 if with_bias else None

    def product(x_MK: Tensor) -> Tensor:
        return _product(x_MK, w_NK, b_N, w_NK.new_empty(len(x_MK), num_columns))

    return _tried(product, lambda count: draw(count, num_products))


def _product(x: Tensor, w_NK: Tensor, b_N: Tensor | None, out: Tensor) -> Tensor:
    """Write the product into `out`, and return it."""
    if b_N is None:
        return torch.mm(x, w_NK.T, out=out)
    return torch.addmm(b_N, x, w_NK.T, out=out)


def _is_aligned(t: Tensor) -> bool:
    return t.is_contiguous() and t.data_ptr() % _BYTES == 0


@dataclass(frozen=True)
class BlockProduct:
    """Matrix prepared for products with rows, in calls of few shapes; not seen by autograd."""

    w_NK: Tensor  # (N', K') weight with N and K rounded up to multiples of 16
    b_N: Tensor | None  # (N',) bias or None
    num_columns: int  # N
    rows: RowRange  # numbers of rows of a call

    @staticmethod
    def of(w_NK: Tensor, b_N: Tensor | None = None) -> "BlockProduct":
        """Prepare a weight (N, K) and a bias (N,) of one dtype; non-contiguous weights and odd sizes are copied."""
        N, K = w_NK.shape
        more_n, more_k = -N % _ALIGNMENT, -K % _ALIGNMENT
        w_NK = F.pad(w_NK, (0, more_k, 0, more_n)) if more_n or more_k else w_NK.contiguous()
        if b_N is not None:
            b_N = F.pad(b_N, (0, more_n)) if more_n else b_N.contiguous()
        rows = _rows_of(
            *w_NK.shape,
            b_N is not None,
            w_NK.dtype,
            w_NK.device,
            w_NK.data_ptr() % _BYTES,
            torch.get_num_threads(),
        )
        return BlockProduct(w_NK, b_N, N, rows)

    def into(self, x_RK: Tensor, out_RN: Tensor) -> Tensor:
        """Write x W^T + b of rows (R, K) to (R, N), each of any floating-point type, and return it."""
        num_rows, N = x_RK.shape[0], self.w_NK.shape[0]
        for part, count in self.rows.calls(num_rows):
            is_all = part.start == 0 and part.stop == num_rows
            x, out = (x_RK, out_RN) if is_all else (x_RK[part], out_RN[part])
            size = x.shape[0]
            x = self._ready(x, count)
            fits = count == size and out.dtype == x.dtype and out.shape[1] == N
            y = out if fits and _is_aligned(out) else x.new_empty(count, N)
            _product(x, self.w_NK, self.b_N, y)
            if y is not out:
                out.copy_(y[:size, : self.num_columns])
        return out_RN

    def _ready(self, x: Tensor, count: int) -> Tensor:
        """Rows prepared for a call: padded, aligned, in the weight's dtype and width."""
        (size, width), K = x.shape, self.w_NK.shape[1]
        if width == K and count == size:
            if x.dtype == self.w_NK.dtype and _is_aligned(x):
                return x
            return torch.empty_like(x, dtype=self.w_NK.dtype, memory_format=torch.contiguous_format).copy_(x)
        x_block = self.w_NK.new_zeros(count, K)
        x_block[:size, :width].copy_(x)
        return x_block


@functools.cache
def _batched_rows_of(
    num_columns: int,
    num_products: int,
    is_transposed: bool,
    dtype: torch.dtype,
    device: torch.device,
    num_threads: int,
) -> RowRange:
    """Numbers of rows of calls of a batched product; `ONE_BY_ONE` also if the other matrices of the batch change a
    result."""
    like = torch.empty(0, device=device, dtype=dtype)
    draw = _drawing(num_columns * 65537 + num_products, like)
    w_BKN = _doubled(draw(_BATCHES[0], num_columns, num_products), 1).mT
    if not is_transposed:
        w_BKN = w_BKN.contiguous()

    def product(x_MK: Tensor) -> Tensor:
        x_BMK = x_MK.repeat(len(w_BKN), 1, 1)
        whole = torch.bmm(x_BMK, w_BKN)
        are_alike = all(
            torch.equal(torch.cat(list(map(torch.bmm, x_BMK.split(n), w_BKN.split(n)))), whole) for n in _BATCHES[1:]
        )
        return (whole if are_alike else torch.full_like(whole, torch.nan)).transpose(0, 1)

    return _tried(product, lambda count: draw(count, num_products))


def batched_product(x_BRK: Tensor, w_BKN: Tensor) -> Tensor:
    """Compute batched x w, (B, R, K) and (B, K, N) -> (B, R, N); a row's result depends only on the row and its matrix.

    Args:
        x_BRK: (B, R, K) with R at most `LARGE_BLOCK_ROWS`.
        w_BKN: (B, K, N) of the same dtype. Both are aligned as allocated, with K and N multiples of 16.

    Returns:
        (B, R, N) in the same dtype; not seen by autograd.
    """
    (_, R, K), N = x_BRK.shape, w_BKN.shape[2]
    where = x_BRK.dtype, x_BRK.device, torch.get_num_threads()
    rows = _batched_rows_of(N, K, w_BKN.stride(2) != 1, *where)
    if rows == ONE_BY_ONE:
        out_BRN = x_BRK.new_empty(*x_BRK.shape[:2], N)
        for x, w, out in zip(x_BRK, w_BKN, out_BRN, strict=True):
            BlockProduct.of(w.mT).into(x, out)
        return out_BRN
    parts = []
    for part, count in rows.calls(R):
        x = x_BRK[:, part]
        x = F.pad(x, (0, 0, 0, count - x.shape[1])) if count > x.shape[1] else x.contiguous()
        parts.append(_in_batches(x, w_BKN)[:, : part.stop - part.start])
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _in_batches(x_BRK: Tensor, w_BKN: Tensor) -> Tensor:
    parts, left = [], len(x_BRK)
    for size in _BATCHES:
        while left >= size:
            batch = slice(len(x_BRK) - left, len(x_BRK) - left + size)
            parts.append(torch.bmm(x_BRK[batch], w_BKN[batch]))
            left -= size
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def plain_linear(x_RK: Tensor, w_NK: Tensor, b_N: Tensor | None, backend: str) -> Tensor:
    """Compute `linear` of rows (R, K), not seen by autograd or autocast."""
    with without_autocast(x_RK.device):
        if uses_triton(backend, x_RK.device, x_RK.dtype):
            # all rows belong to one expert
            offsets_E = torch.arange(2, dtype=torch.int32, device=x_RK.device) * x_RK.shape[0]
            b_EN = None if b_N is None else b_N[None]
            return triton_linear.forward(x_RK, w_NK[None], offsets_E, b_EN, transposed=False, batch_invariant=True)
        if native_linear.serves(x_RK, w_NK, b_N):
            return native_linear.linear(x_RK, w_NK, b_N)
        if x_RK.shape[1] != w_NK.shape[1]:  # blocks are padded, so no product would refuse it
            raise wrong_shape("x", x_RK, f"(..., {w_NK.shape[1]}) with this weight", "check the inputs")
        dtype = gemm_dtype(x_RK.device, x_RK.dtype)
        block = BlockProduct.of(w_NK.to(dtype), None if b_N is None else b_N.to(dtype))
        return block.into(x_RK, x_RK.new_empty(x_RK.shape[0], w_NK.shape[0]))


_linear = torch.library.custom_op("expertmesh::invariant_linear", plain_linear, mutates_args=())
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
    """Compute x W^T + b; a row's result does not depend on the other rows or their number.

    Args:
        x: (..., K), float64, float32, bfloat16 or float16. Under autocast all arguments are cast to its dtype.
        w_NK: (N, K), in x's dtype.
        b_N: (N,) or None; added before the result is rounded.

    Returns:
        (..., N) in x's dtype (autocast's under autocast). Differentiable; gradients are ordinary sums. Does not
        synchronise, except for the trial in the first call of a shape.
    """
    dtype = autocast_dtype(x.device)
    if dtype is not None and x.dtype != torch.float64:
        x, w_NK, b_N = x.to(dtype), w_NK.to(dtype), None if b_N is None else b_N.to(dtype)
    run = plain_linear if runs_plainly(x, w_NK, b_N) else _linear
    y_RN: Tensor = run(x.reshape(-1, x.shape[-1]), w_NK, b_N, backend)
    return y_RN.view(*x.shape[:-1], w_NK.shape[0])


def head_linear(x_THn: Tensor, w_Hmn: Tensor) -> Tensor:
    """Product of each head with its own matrix, (T, H, n) -> (T, H, m), with the bits of `linear`; differentiable."""
    needs = torch.is_grad_enabled() and (x_THn.requires_grad or w_Hmn.requires_grad)
    if not needs and native_linear.serves_each(x_THn, w_Hmn):
        return native_linear.head_linear(x_THn, w_Hmn)
    heads = zip(x_THn.unbind(1), w_Hmn.unbind(0), strict=True)
    return torch.stack([linear(x.contiguous(), w.contiguous()) for x, w in heads], 1)


def _plain_pointwise(x: Tensor, name: str) -> Tensor:
    function = _FUNCTIONS[name]
    length = x.numel()
    padded = x.new_zeros(-(-length // _PIECE) * _PIECE)
    used = padded[:length]
    used.view(x.shape).copy_(x)
    is_short = length <= _PIECE or x.device.type != "cpu"
    pieces = (padded,) if is_short else padded.split(_PIECE)
    for piece in pieces:
        function(piece, out=piece)
    return used.view(x.shape)


def _own_pointwise(x: Tensor, name: str) -> Tensor:
    # a custom operator must not return a view of a larger buffer
    return _plain_pointwise(x, name).clone(memory_format=torch.contiguous_format)


_pointwise = torch.library.custom_op("expertmesh::invariant_pointwise", _own_pointwise, mutates_args=())
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
    """Compute exp, erf, cos, sin or tanh of FP32 or FP64 elements, independent of their positions; differentiable; does
    not synchronise."""
    y: Tensor = (_plain_pointwise if runs_plainly(x) else _pointwise)(x, name)
    return y


@functools.cache
def _sums_are_alike(length: int, dtype: torch.dtype, device: torch.device, num_threads: int) -> bool:
    """Whether PyTorch's sum of a row is the same beside any other rows; tested once."""
    if device.type != "cpu" or not 0 < length <= _MOST_SUMMED:
        return False
    most = _rows_summed(length)
    x_RK = _drawing(length, torch.empty(0, dtype=dtype))(most, length)
    alone = torch.cat([row.clone().sum(-1) for row in x_RK.split(1)])
    return all(
        torch.equal(x_RK[:count].sum(-1), alone[:count])
        and torch.equal(x_RK[most - count :].sum(-1), alone[most - count :])
        for count in range(1, most + 1)
    )


def _rows_summed(length: int) -> int:
    return min(_MOST_SUMMED // length, _MOST_ROWS_SUMMED)


def _tree_sum(x: Tensor) -> Tensor:
    n = x.shape[-1]
    x = F.pad(x, (0, (1 << max(n - 1, 0).bit_length()) - n))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def _plain_row_sum(x: Tensor) -> Tensor:
    n = x.shape[-1]
    if x.numel() == 0 or not _sums_are_alike(n, x.dtype, x.device, torch.get_num_threads()):
        return _tree_sum(x).clone(memory_format=torch.contiguous_format)
    rows = x.reshape(-1, n).contiguous()
    if x.numel() <= _MOST_SUMMED and len(rows) <= _MOST_ROWS_SUMMED:
        return rows.sum(-1).view(*x.shape[:-1], 1)
    parts = [part.sum(-1) for part in rows.split(_rows_summed(n))]
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y.view(*x.shape[:-1], 1)


_row_sum = torch.library.custom_op("expertmesh::invariant_row_sum", _plain_row_sum, mutates_args=())
_row_sum.register_fake(lambda x: x.new_empty(*x.shape[:-1], 1))


def _save_shape(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


_row_sum.register_autograd(lambda ctx, grad: grad.expand(ctx.shape), setup_context=_save_shape)


def row_sum(x: Tensor) -> Tensor:
    """Sum along the last axis, (..., n) -> (..., 1), in an order that depends on n only; differentiable."""
    if native_rows.sums(x):
        return native_rows.row_sum(x)
    y: Tensor = (_plain_row_sum if runs_plainly(x) else _row_sum)(x)
    return y


def sigmoid(x: Tensor) -> Tensor:
    """Compute 1 / (1 + exp(-x)) in FP32 or FP64, without overflow in value or gradient."""
    small = pointwise(torch.where(x >= 0, -x, x), "exp")
    return torch.where(x >= 0, 1.0, small) / (1.0 + small)


def softmax(x: Tensor) -> Tensor:
    """Softmax along the last axis, FP32 or FP64; a row of -inf only gives 0."""
    if native_rows.sums(x):
        return native_rows.softmax(x)
    largest = x.detach().amax(-1, keepdim=True)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)
    e = pointwise(x - largest, "exp")
    return e / row_sum(e).clamp_min(torch.finfo(x.dtype).tiny)


def unit_rows(x: Tensor, *, eps: float) -> Tensor:
    """Compute x / max(|x|, eps) along the last axis, as `torch.nn.functional.normalize` does."""
    return x / row_sum(x * x).clamp_min(eps * eps).sqrt()  # the square root has no gradient at 0


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm x / sqrt(mean(x^2) + eps) * weight over the last axis, in FP32 (FP64 for FP64), rounded to x's dtype
    once."""
    if native_rows.serves(x, weight):
        return native_rows.rms_norm(x, weight, eps=eps)
    dtype = accumulate_dtype(x.dtype)
    wide = x.to(dtype)
    mean = row_sum(wide * wide) / x.shape[-1]
    return (wide / (mean + eps).sqrt() * weight.to(dtype)).to(x.dtype)


def activate(h_RGF: Tensor, inner: str) -> Tensor:
    """Activate FP32 or FP64 pre-activations (R, G, F) -> (R, F); `inner` is from `ops.activation.inner_name`."""
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
