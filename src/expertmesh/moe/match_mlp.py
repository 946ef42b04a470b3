"""Recognises feed-forward blocks in foreign modules that grouped experts can compute: by structure, then by comparing
outputs."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from typing import Any, get_args

import torch
from torch import Tensor, nn

from expertmesh.config.moe_rules import Activation
from expertmesh.ops.activation import inner_name, num_branches, pointwise

_PLAIN = tuple(name for name in get_args(Activation) if num_branches(name) == 1)
_NUM_PROBES = 64
_ROUNDING = 1e-9
"""Relative difference in FP64 below which two functions count as equal; different activations differ by 1e-5 and
more."""


PROBED = tuple(name for name in get_args(Activation) if name != "clamped_swiglu")
"""Activations that small random inputs tell apart; the clamp of clamped_swiglu shows for large inputs only."""


@dataclass(frozen=True)
class MatchedMLP:
    """A feed-forward block act(x W_in^T + b_in) W_out^T + b_out, or its gated form, found in a module."""

    activation: Activation  # name of the activation, as `MoELayer` takes it
    # names of the linear maps D -> F inside the module: (gate, up) of a gated block, else one
    in_names: tuple[str, ...]
    out_name: str  # name of the linear map F -> D
    dim: int  # D
    hidden_dim: int  # F
    biased: tuple[str, ...]  # names of the linear maps that have a bias

    @property
    def bias(self) -> bool:
        """Whether any of the linear maps has a bias."""
        return bool(self.biased)

    def weights(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Stack the weights of a module of this form.

        Returns:
            w_in (G, F, D), w_out (D, F), b_in (G, F) and b_out (D,), detached; missing biases are zero, and both are
            None if the module has no bias at all.
        """
        names = (*self.in_names, self.out_name)
        linears: list[Any] = [module.get_submodule(name) for name in names]
        *w_in, w_out = (linear.weight.detach() for linear in linears)
        if not self.bias:
            return torch.stack(w_in), w_out, None, None
        *b_in, b_out = (
            linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
            for linear in linears
        )
        return torch.stack(w_in), w_out, torch.stack(b_in), b_out


def match_activation(function: Callable[[Tensor], Tensor]) -> str | None:
    """Name a point-wise function by its values on a grid.

    Args:
        function: takes and returns a tensor; an nn.Module or any callable.

    Returns:
        "silu", "gelu" (the exact one), "relu" or "relu2"; None for any other function, or one that fails on FP64.

    Example:
        >>> match_activation(torch.nn.functional.silu)
        'silu'
    """
    grid = torch.cat([torch.linspace(-8, 8, 257, dtype=torch.float64), torch.zeros(1).double()])
    try:
        found = function(grid.clone())
    except (AttributeError, NameError, RuntimeError, TypeError, ValueError):
        return None  # also what a later line defines
    if not isinstance(found, Tensor) or found.shape != grid.shape:
        return None
    return next((n for n in _PLAIN if _equal(found, pointwise(grid, inner_name(n)))), None)


def match_mlp(module: nn.Module) -> MatchedMLP | None:
    """Recognise a feed-forward block of two linear maps, or of three with a gate.

    Candidates come from the module's structure. A candidate is accepted if a copy of the module on the CPU in FP64 has
    the candidate's outputs for random rows. Modules with other parameters, buffers, hooks or active dropout are not
    recognised.

    Returns:
        The block, or None.

    Example:
        >>> block = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        >>> match_mlp(block).activation
        'relu'
    """
    linears = {name: m for name, m in module.named_modules() if type(m) is nn.Linear}
    if len(linears) not in (2, 3) or _holds_more(module, linears):
        return None
    probe = copy.deepcopy(module).to(device="cpu", dtype=torch.float64).eval()
    results: dict[int, tuple[Tensor, Tensor | None]] = {}
    for candidate in _candidates(linears):
        if candidate.dim not in results:
            results[candidate.dim] = _probed(probe, candidate.dim)
        x_TD, found_TD = results[candidate.dim]
        if found_TD is not None and _equal(found_TD, _computed(probe, candidate, x_TD)):
            return candidate
    return None


def _holds_more(module: nn.Module, linears: dict[str, nn.Linear]) -> bool:
    """Whether the module has further parameters, buffers, active dropout, hooks, or parameters on the meta device."""
    owned = sum(1 for linear in linears.values() for _ in linear.parameters())
    if len(list(module.parameters())) != owned or any(True for _ in module.buffers()):
        return True
    if any(p.is_meta for p in module.parameters()):
        return True
    return any((isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0) or m._forward_hooks for m in module.modules())


def _candidates(linears: dict[str, nn.Linear]) -> list[MatchedMLP]:
    """All assignments of two or three linear maps to gate, up and down whose shapes fit."""
    found = []
    biased = tuple(name for name, linear in linears.items() if linear.bias is not None)
    for names in permutations(linears):
        *into, out = names
        w_out = linears[out]
        shape = (w_out.out_features, w_out.in_features)
        if any((linears[n].in_features, linears[n].out_features) != shape for n in into):
            continue
        branches = len(into)
        found += [
            MatchedMLP(name, tuple(into), out, *shape, biased) for name in PROBED if num_branches(name) == branches
        ]
    return found


def _probed(probe: nn.Module, dim: int) -> tuple[Tensor, Tensor | None]:
    """Random rows (T, D) and the module's output for them; None: the module cannot take them."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_NUM_PROBES, dim, generator=generator, dtype=torch.float64)
    try:
        with torch.no_grad():
            found = probe(x_TD)
    except (RuntimeError, TypeError, ValueError):
        return x_TD, None
    return x_TD, found if isinstance(found, Tensor) else None


def _computed(probe: nn.Module, candidate: MatchedMLP, x_TD: Tensor) -> Tensor:
    """Output (T, D) of a candidate block with the module's weights."""
    w_in, w_out, b_in, b_out = candidate.weights(probe)
    h_TGF = torch.einsum("td,gfd->tgf", x_TD, w_in)
    if b_in is not None:
        h_TGF = h_TGF + b_in
    act_TF = pointwise(h_TGF[:, 0], inner_name(candidate.activation))
    if len(candidate.in_names) == 2:
        act_TF = act_TF * h_TGF[:, 1]
    y_TD = act_TF @ w_out.T
    return y_TD if b_out is None else y_TD + b_out


def _equal(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape or not bool(found.isfinite().all()):
        return False
    return float((found - expected).norm()) <= _ROUNDING * float(expected.norm())
