"""The one place with tolerances: the two-times rule and the FP64 rule.

A fixed tolerance of 1e-2 lets a scale bug of half a percent pass. The two-times rule asks instead whether we are as
exact as plain PyTorch is in the same precision, measured against an FP64 oracle:

    err(ours, oracle) <= 2 * err(plain PyTorch in the same precision, oracle) + floor

with err the largest absolute difference. The floor covers lucky references (a scalar, three elements) and is a few
units in the last place of the largest oracle value.

Twice the error of another order of summation is no bound where there are few numbers: on another processor both orders
change, and one of them may be lucky. Where the size of what is summed is known (`Sums`), the floor is therefore another
one, with a proof: the rounding that a sum of that length has in any order (`rounding_bound`), element by element.
For a whole layer it is the running error of the chain of its operations (`rounded`, `oracle_rounding`).
`docs/numerics.md` has the policy in words.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TWO = 2.0
"""How much worse than plain PyTorch in the same precision we may be."""
FLOOR_ULPS = 2.0
"""Floor of the two-times rule in units of eps(dtype) * largest oracle value."""
FP64_RELATIVE = 1e-10
"""Largest difference between two FP64 computations of the same thing, relative to the largest value."""
FINITE_DIFFERENCE_RELATIVE = 1e-6
"""Largest difference between a hand-written derivative and a central difference, relative to their size."""
CHOICE_MARGIN = 1e-5
"""Scores that differ by less may be ranked differently in FP32 and FP64: such draws decide nothing about a layer."""
ROUTING_WEIGHT_ULPS = 32.0
"""Error allowed in a routing weight of FP32 (a few rounded operations on a softmax), in eps of the largest weight."""
ROUNDING_CONFIDENCE = 4.0
"""Lambda of the probabilistic rounding bound. By Hoeffding's inequality a sum exceeds it with a probability below
2 exp(-lambda^2 / 2) = 7e-4 if every rounding is as large as it can be, and 2 exp(-3 lambda^2 / 2) = 8e-11 if roundings
are spread evenly (variance u^2 / 3)."""
LIKELIHOOD_NATS = 1e-4
"""Largest difference between the log-probabilities that two implementations of a model give the same text, in FP32."""
SMALLEST_SCALE = 1e-30
"""Stands for the largest value where everything is zero, so that a relative rule stays defined."""

Array = Tensor | np.ndarray | float


def as_fp64(value: Array) -> np.ndarray:
    """Any tensor, array or number as a NumPy FP64 array (copies to the CPU, synchronises)."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64).numpy()
    return np.asarray(value, dtype=np.float64)


def errors(value: Array, oracle: Array) -> np.ndarray:
    """Absolute differences; inf where one side is not finite and the other is another value.

    Raises:
        AssertionError: the shapes differ.
    """
    a, b = as_fp64(value), as_fp64(oracle)
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    with np.errstate(invalid="ignore"):
        difference = np.where(a == b, 0.0, np.abs(a - b))
    return np.where(np.isfinite(difference), difference, np.inf)


def max_error(value: Array, oracle: Array) -> float:
    """The largest of the `errors`; 0 for empty arrays."""
    return float(errors(value, oracle).max(initial=0.0))


def magnitude(oracle: Array) -> float:
    """Largest absolute value, never below `SMALLEST_SCALE`; what relative errors are relative to."""
    values = np.abs(as_fp64(oracle))
    return max(float(values.max()) if values.size else 0.0, SMALLEST_SCALE)


def relative_error(value: Array, oracle: Array) -> float:
    """`max_error` divided by the `magnitude` of the oracle."""
    return max_error(value, oracle) / magnitude(oracle)


@dataclass(frozen=True)
class Sums:
    """What the sums behind a result consist of, from which `rounding_bound` derives what rounding may do to them.

    Attributes:
        sizes: FP64, the result's shape: the sum of the summands' absolute values, |A| |B| for a product A B. For a
            chain of products, the chain of the absolute values.
        length: number of summands; for a chain of products, the lengths added up.
        dtype: precision in which is summed: FP32 for 16-bit operands, else the operands' own.
    """

    sizes: np.ndarray
    length: int
    dtype: torch.dtype = torch.float32


def sums_of_product(a: Array, b: Array, *, plus: Array = 0.0, dtype: torch.dtype | None = None) -> Sums:
    """The sums of the matrix product `a @ b + plus`.

    Args:
        a, b: factors; leading dimensions as in NumPy's matmul.
        plus: what is added before the result is rounded, a bias for instance.
        dtype: precision in which is summed; None: FP32, FP64 where a factor is a tensor of FP64.
    """
    is_wide = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in (a, b))
    a64, b64, plus64 = (np.abs(as_fp64(t)) for t in (a, b, plus))
    accumulate = torch.float64 if is_wide else torch.float32
    return Sums(a64 @ b64 + plus64, a64.shape[-1] + plus64.any(), dtype or accumulate)


def sums_of_terms(terms: Tensor, dim: int, *, dtype: torch.dtype = torch.float32) -> Sums:
    """The sums of FP64 `terms` (products of factors, for instance) along a dimension, accumulated in `dtype`."""
    return Sums(as_fp64(terms.abs().sum(dim)), terms.shape[dim], dtype)


def roundoff_of_sums(length: int, unit: float) -> float:
    """Error of a sum of `length` terms relative to the sum of their absolute values, for a unit roundoff."""
    return min(float(length), ROUNDING_CONFIDENCE * length**0.5) * unit


def rounding_bound(sums: Sums, oracle: Array, dtype: torch.dtype) -> np.ndarray:
    """The most that rounding does to every element of a sum, in whatever order it is summed.

    The probabilistic bound of an inner product of n terms (Higham and Mary, "A new approach to probabilistic rounding
    error analysis", SIAM J. Sci. Comput. 41, 2019, theorem 3.1) with the unit roundoff u of the accumulation type,

        lambda sqrt(n) u |A| |B|,

    or the certain bound n u |A| |B| where that is smaller, and half a unit in the last place of the output type.

    Args:
        sums: what is summed.
        oracle: the FP64 result.
        dtype: type of the output, to which the sum is rounded once.
    """
    factor = roundoff_of_sums(sums.length, torch.finfo(sums.dtype).eps / 2)
    summed, out = factor * sums.sizes, torch.finfo(dtype)
    _, exponents = np.frexp(np.maximum(np.abs(as_fp64(oracle)) + summed, out.tiny))
    return summed + out.eps / 2 * np.exp2(exponents - 1.0)


def two_times_bound(
    references: Tensor | Sequence[Tensor],
    oracle: Array,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 0.0,
    sums: Sums | None = None,
    rounding: np.ndarray | None = None,
) -> np.ndarray:
    """The largest error that the two-times rule allows: one number, or with `sums` or `rounding` one per element.

    Args:
        references: plain PyTorch's result in the same precision, or several of them computed in different orders;
            the worst counts, so that one lucky summation order does not decide.
        oracle: the FP64 result.
        dtype: precision whose eps scales the floor; None: the references' own.
        scale: size of the summands where they cancel; the floor uses it where it exceeds the oracle's largest value.
        sums: what the result sums; then the floor is their `rounding_bound`.
        rounding: a bound of the error of every element, beside that floor.
    """
    references = [references] if isinstance(references, Tensor) else list(references)
    twice = TWO * max(max_error(reference, oracle) for reference in references)
    if sums is not None:
        return np.maximum(twice, rounding_bound(sums, oracle, references[0].dtype))
    eps = torch.finfo(dtype or references[0].dtype).eps
    bound = np.asarray(twice + FLOOR_ULPS * eps * max(magnitude(oracle), scale))
    return bound if rounding is None else np.maximum(bound, rounding)


def assert_two_times(
    ours: Tensor,
    same_precision_reference: Tensor | Sequence[Tensor],
    oracle: Array,
    *,
    what: str,
    dtype: torch.dtype | None = None,
    scale: float = 0.0,
    sums: Sums | None = None,
    rounding: np.ndarray | None = None,
) -> None:
    """Assert err(ours, oracle) <= 2 * err(plain PyTorch in the same precision, oracle) + floor.

    Args:
        ours: the tensor under test, any floating dtype.
        same_precision_reference: plain PyTorch's result in the same precision, or several (see `two_times_bound`).
        oracle: the FP64 result: NumPy array or tensor of the same shape.
        what: named in the message.
        dtype: precision whose eps scales the floor; None: the references' own. Give it where a value of high
            precision comes from low-precision ones (the FP32 router's gradient in a BF16 layer).
        scale: size of the summands where they cancel (see `two_times_bound`).
        sums: what the result sums, where that is known; then their `rounding_bound` is the floor.
        rounding: what rounding may do to every element, where that is known, beside that floor.

    Raises:
        AssertionError: too far off, not finite where the oracle is, or of another shape or dtype than the reference.
    """
    first = same_precision_reference if isinstance(same_precision_reference, Tensor) else same_precision_reference[0]
    assert ours.dtype == first.dtype, f"{what}: dtype {ours.dtype}, the reference has {first.dtype}"
    bound = two_times_bound(same_precision_reference, oracle, dtype=dtype, scale=scale, sums=sums, rounding=rounding)
    found, largest = errors(ours, oracle), magnitude(oracle)
    allowed = np.broadcast_to(bound, found.shape)
    if (found <= allowed).all():
        return
    worst = np.unravel_index(np.argmax(found - allowed), found.shape)
    raise AssertionError(
        f"{what}: error {found[worst] / largest:.3e} of the largest value, allowed {allowed[worst] / largest:.3e} "
        "(twice plain PyTorch's in "
        f"{ours.dtype}{'' if sums is None and rounding is None else ' or the bound of its rounding'})"
    )


def assert_two_times_rms(
    ours: Sequence[Tensor],
    same_precision_reference: Sequence[Tensor],
    oracle: Sequence[Array],
    *,
    what: str,
    dtype: torch.dtype,
) -> None:
    """Assert rms(ours - oracle) <= 2 * rms(plain PyTorch in the same precision - oracle) + eps / 2 over draws.

    Of many numbers, which one is farthest off is a matter of luck; their root mean square is not. Every tensor is
    divided by the root mean square of its oracle first, so that draws count alike.

    Args:
        ours: the tensor under test, of each draw, and of each layer where they are pooled.
        same_precision_reference: plain PyTorch's results, in the same order.
        oracle: the FP64 results.
        what: named in the message.
        dtype: precision whose eps scales the floor.

    Raises:
        AssertionError: too far off, not finite where the oracle is, or shapes differ.
    """
    found, reference = (_relative_rms(values, oracle) for values in (ours, same_precision_reference))
    allowed = TWO * reference + torch.finfo(dtype).eps / 2
    assert found <= allowed, (
        f"{what}: root mean square error {found:.3e} of the values', allowed {allowed:.3e} (twice plain PyTorch's in "
        f"{dtype})"
    )


def _relative_rms(values: Sequence[Tensor], oracles: Sequence[Array]) -> float:
    """The root mean square of all errors, those of each tensor over the root mean square of its oracle."""
    pairs = list(zip(values, oracles, strict=True))
    scales = [max(np.sqrt(np.square(as_fp64(exact)).mean()), SMALLEST_SCALE) for _, exact in pairs]
    relative = [errors(*pair) / scale for pair, scale in zip(pairs, scales, strict=True)]
    return float(np.sqrt(np.square(np.concatenate([one.ravel() for one in relative])).mean()))


def assert_close_fp64(ours: Array, oracle: Array, *, what: str, scale: float | None = None) -> None:
    """Assert that two FP64 results agree to 1e-10 of the largest oracle value.

    Args:
        ours: FP64 tensor or array.
        oracle: the other one, same shape.
        what: named in the message.
        scale: what the error is relative to; None: the oracle's largest value. Give the size of the summands where
            they cancel.

    Raises:
        AssertionError: too far off, another shape, or `ours` is a tensor that is not FP64.
    """
    assert not isinstance(ours, Tensor) or ours.dtype == torch.float64, f"{what}: dtype is {ours.dtype}, not float64"
    error = max_error(ours, oracle) / (scale or magnitude(oracle))
    assert error <= FP64_RELATIVE, f"{what}: relative error {error:.3e}, allowed {FP64_RELATIVE:.0e}"


def assert_weights(ours: Tensor, oracle: Array, *, what: str) -> None:
    """Assert that routing weights are those of the oracle to the rounding of their own precision (FP32 or FP64)."""
    allowed = ROUTING_WEIGHT_ULPS * torch.finfo(ours.dtype).eps
    error = relative_error(ours, oracle)
    assert error <= allowed, f"{what}: relative error {error:.3e}, allowed {allowed:.1e}"


def assert_close_to_difference(derivative: float, difference: float, *, what: str, scale: float) -> None:
    """Assert that a directional derivative equals a central difference, relative to `scale` (the gradient's size)."""
    error = abs(derivative - difference) / max(scale, SMALLEST_SCALE)
    assert error <= FINITE_DIFFERENCE_RELATIVE, f"{what}: {derivative!r} by hand, {difference!r} by differences"


def assert_differs(a: Array, b: Array, *, what: str) -> None:
    """Assert that two results differ by more than rounding could explain (1000 times the FP64 rule, or in shape)."""
    a64, b64 = as_fp64(a), as_fp64(b)
    if a64.shape != b64.shape:
        return
    assert a64.size and relative_error(a64, b64) > 1000 * FP64_RELATIVE, f"{what}: nothing changed"
