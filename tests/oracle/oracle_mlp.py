"""FP64 NumPy: activations and one expert on one token, forwards and backwards, by hand."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
GATED_BY = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "clamped_swiglu": "clamped_silu"}

_erf = np.vectorize(math.erf, otypes=[np.float64])


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), without overflow."""
    e = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0 / (1.0 + e), e / (1.0 + e))


def _silu(z: Array) -> Array:
    return z * sigmoid(z)


def _silu_slope(z: Array) -> Array:
    s = sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def _gelu(z: Array) -> Array:
    return 0.5 * z * (1.0 + _erf(z / math.sqrt(2.0)))


def _gelu_slope(z: Array) -> Array:
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + _erf(z / math.sqrt(2.0))) + z * density


def _relu(z: Array) -> Array:
    return np.maximum(z, 0.0)


def _relu_slope(z: Array) -> Array:
    return (z > 0).astype(np.float64)


def _clamped_silu(z: Array) -> Array:
    small = np.minimum(z, 7.0)
    return small * sigmoid(1.702 * small)


def _clamped_silu_slope(z: Array) -> Array:
    s = sigmoid(1.702 * z)
    return np.where(z <= 7.0, s * (1.0 + 1.702 * z * (1.0 - s)), 0.0)


def second_branch(up: Array, activation: str) -> tuple[Array, Array]:
    """What multiplies act(gate), and its slope."""
    if activation != "clamped_swiglu":
        return up, np.ones_like(up)
    return np.clip(up, -7.0, 7.0) + 1.0, (np.abs(up) <= 7.0).astype(np.float64)


FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {
    "silu": (_silu, _silu_slope),
    "gelu": (_gelu, _gelu_slope),
    "relu": (_relu, _relu_slope),
    "clamped_silu": (_clamped_silu, _clamped_silu_slope),
    "relu2": (lambda z: _relu(z) ** 2, lambda z: 2.0 * _relu(z)),
}
"""Name -> (function, derivative)."""


def activate(h_GF: Array, activation: str) -> Array:
    """(G, F) pre-activations -> (F,): act(gate) * up where gated (index 0 is the gate), else act(h)."""
    if activation in GATED_BY:
        function, _ = FUNCTIONS[GATED_BY[activation]]
        return function(h_GF[0]) * second_branch(h_GF[1], activation)[0]
    return FUNCTIONS[activation][0](h_GF[0])


def activate_backward(h_GF: Array, da_F: Array, activation: str) -> Array:
    """Gradient of the pre-activations from the gradient of the activation."""
    if activation in GATED_BY:
        function, slope = FUNCTIONS[GATED_BY[activation]]
        second, second_slope = second_branch(h_GF[1], activation)
        d_up = da_F * function(h_GF[0]) * second_slope
        return np.stack([da_F * second * slope(h_GF[0]), d_up])
    return (da_F * FUNCTIONS[activation][1](h_GF[0]))[None]


@dataclass(frozen=True)
class MLP:
    """Weights of one MLP, or views of one expert's: w_in (G, F, D), w_out (D, F), biases (G, F) and (D,) or None."""

    w_in: Array
    w_out: Array
    b_in: Array | None
    b_out: Array | None
    activation: str

    def forward(self, x_D: Array) -> Array:
        """(D,) -> (D,)."""
        out = self.w_out @ activate(self._pre_activation(x_D), self.activation)
        return out if self.b_out is None else out + self.b_out

    def backward(self, x_D: Array, dout_D: Array, grads: "MLP") -> Array:
        """Add the gradients of the parameters into `grads` in place and return the gradient of x."""
        h_GF = self._pre_activation(x_D)
        dh_GF = activate_backward(h_GF, self.w_out.T @ dout_D, self.activation)
        grads.w_out[...] += np.outer(dout_D, activate(h_GF, self.activation))
        dx_D = np.zeros_like(x_D)
        for g in range(h_GF.shape[0]):
            grads.w_in[g] += np.outer(dh_GF[g], x_D)
            dx_D += self.w_in[g].T @ dh_GF[g]
        if grads.b_in is not None:
            grads.b_in[...] += dh_GF
        if grads.b_out is not None:
            grads.b_out[...] += dout_D
        return dx_D

    def _pre_activation(self, x_D: Array) -> Array:
        h_GF = np.stack([w_FD @ x_D for w_FD in self.w_in])
        return h_GF if self.b_in is None else h_GF + self.b_in


def mlp_of(params: dict[str, Array], prefix: str, activation: str, expert: int | None = None) -> MLP:
    """The MLP whose tensors are named `prefix`w_in and so on; `expert` picks one of stacked experts (views)."""

    def part(name: str) -> Array | None:
        value = params.get(prefix + name)
        return value if value is None or expert is None else value[expert]

    w_in, w_out = part("w_in"), part("w_out")
    assert w_in is not None and w_out is not None, f"no weights named {prefix}*"
    return MLP(w_in, w_out, part("b_in"), part("b_out"), activation)
