"""Numbers with a bound of what rounding did to them: running error analysis, in FP64 NumPy.

Every operation passes on the errors of its operands to first order and adds its own rounding (Higham, "Accuracy and
Stability of Numerical Algorithms", section 3.3), sums by the probabilistic bound of `numerics.roundoff_of_sums`. Errors
add up in absolute value, so that the bound is one for every order of summation and every processor.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Union

import numpy as np

from tests.oracle.numerics import roundoff_of_sums

Array = np.ndarray
FUNCTION_ROUNDINGS = 8.0
"""Roundings in the evaluation of an activation, a softmax or a sigmoid and its derivative."""


@dataclass(frozen=True)
class Rounded:
    """Exact values as FP64, a bound of the absolute errors of the same shape, and the unit roundoff of operations."""

    value: Array
    error: Array
    unit: float

    @staticmethod
    def exact(value: Array, unit: float) -> "Rounded":
        """Values without an error."""
        return Rounded(value, np.zeros_like(value), unit)

    def to(self, unit: float) -> "Rounded":
        """The same values, rounded to a type of this unit roundoff; operations on them go on in the type of before."""
        return replace(self, error=self.error + unit * np.abs(self.value))

    def _found(self, value: Array, error: Array) -> "Rounded":
        return Rounded(value, np.broadcast_to(error, value.shape), self.unit).to(self.unit)

    def _lifted(self, other: Union["Rounded", Array, float]) -> "Rounded":
        return other if isinstance(other, Rounded) else self.exact(np.asarray(other), self.unit)

    def __add__(self, other: Union["Rounded", Array, float]) -> "Rounded":
        """Sum, element by element."""
        b = self._lifted(other)
        return self._found(self.value + b.value, self.error + b.error)

    def __mul__(self, other: Union["Rounded", Array, float]) -> "Rounded":
        """Product, element by element."""
        b = self._lifted(other)
        error = np.abs(self.value) * b.error + self.error * np.abs(b.value) + self.error * b.error
        return self._found(self.value * b.value, error)

    def __neg__(self) -> "Rounded":
        """The same with the other sign."""
        return replace(self, value=-self.value)

    def __getitem__(self, index: Any) -> "Rounded":
        """Some of the numbers."""
        return replace(self, value=self.value[index], error=self.error[index])

    def product(self, subscripts: str, other: Union["Rounded", Array], length: int, *, to: float = 0.0) -> "Rounded":
        """A sum of `length` products of two factors, as NumPy's einsum has it, rounded to a type of unit roundoff
        `to`."""
        b = self._lifted(other)
        sizes = np.abs(self.value), np.abs(b.value)
        error = (
            np.einsum(subscripts, sizes[0], b.error)
            + np.einsum(subscripts, self.error, sizes[1] + b.error)
            + roundoff_of_sums(length, self.unit) * np.einsum(subscripts, *sizes)
        )
        value = np.einsum(subscripts, self.value, b.value)
        return Rounded(value, error, self.unit).to(to)

    def sum(self, axis: int, *, to: float = 0.0) -> "Rounded":
        """The sum along an axis, rounded to a type of unit roundoff `to`."""
        own = roundoff_of_sums(self.value.shape[axis], self.unit) * np.abs(self.value).sum(axis)
        return Rounded(self.value.sum(axis), self.error.sum(axis) + own, self.unit).to(to)

    def function(self, function: Callable[[Array], Array], *, size: float) -> "Rounded":
        """A function of every number, which may jump; `size`: of the summands in it beside its argument and itself."""
        z, value = self.value, function(self.value)
        moved = [np.abs(function(z + sign * self.error) - value) for sign in (-1.0, 1.0)]
        own = FUNCTION_ROUNDINGS * self.unit * (np.abs(value) + np.abs(z) + size)
        return Rounded(value, np.maximum(*moved) + own, self.unit)


def softmax_of(z_NC: Rounded) -> Rounded:
    """Softmax along the last axis."""
    e_NC = np.exp(z_NC.value - z_NC.value.max(1, keepdims=True, initial=-np.inf))
    s_NC = e_NC / e_NC.sum(1, keepdims=True)
    error = np.einsum("nij,nj->ni", np.abs(_slopes(s_NC)), z_NC.error)
    return Rounded(s_NC, error + FUNCTION_ROUNDINGS * z_NC.unit * s_NC, z_NC.unit)


def softmax_backward_of(s_NC: Rounded, ds_NC: Rounded) -> Rounded:
    """Gradient of the logits from a softmax and its gradient, whose common part cancels."""
    s, ds = s_NC.value, ds_NC.value
    slopes_NCC = _slopes(s)
    doubt_NCC = s_NC.error[:, :, None] * s[:, None] + s[:, :, None] * s_NC.error[:, None]
    own = np.einsum("nii->ni", doubt_NCC)
    own[...] = s_NC.error * np.abs(1.0 - 2.0 * s)
    size = s * (np.abs(ds) + (s * np.abs(ds)).sum(1, keepdims=True))
    error = np.einsum("nij,nj->ni", np.abs(slopes_NCC), ds_NC.error)
    error += np.einsum("nij,nj->ni", doubt_NCC, np.abs(ds)) + FUNCTION_ROUNDINGS * s_NC.unit * size
    return Rounded(np.einsum("nij,nj->ni", slopes_NCC, ds), error, s_NC.unit)


def _slopes(s_NC: Array) -> Array:
    return s_NC[:, :, None] * (np.eye(s_NC.shape[1]) - s_NC[:, None])
