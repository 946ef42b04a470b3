"""FLOP formulas of ExpertMesh's operators for PyTorch's `FlopCounterMode`; importing this module registers them.

    import expertmesh.integrations.flop_counter
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode() as counter:
        model(batch).loss.backward()
    counter.get_total_flops()

As for PyTorch's own operators, a multiply-add counts as two, only matmuls are counted, and recomputation in a backward
is counted again. Dropped or unrouted rows cost nothing.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.utils.flop_counter

# These imports define the operators.
import expertmesh.ops.attention.query_blocks
import expertmesh.ops.experts.adapted_linear
import expertmesh.ops.experts.grouped_linear
import expertmesh.ops.experts.operator
import expertmesh.ops.router_linear  # noqa: F401

Shape = tuple[int, ...]
_OPERATORS = torch.ops.expertmesh


def _count(*operators: Any) -> Any:
    return torch.utils.flop_counter.register_flop_formula(operators)


def _of_row(*matrices: Shape) -> int:
    """FLOPs of one row with one matrix of each shape, (E, ...)."""
    return sum(2 * prod(shape[1:]) for shape in matrices)


def _num_rows(maps: Sequence[Shape]) -> int:
    return maps[1][0]


@_count(_OPERATORS.moe_mlp)
def _moe_mlp(_x: Shape, _weights: Shape, w_in: Any, w_out: Any, *rest: Any, **_: Any) -> int:
    _b_in, _b_out, _scales, maps, *_ignored = rest
    return _num_rows(maps) * _of_row(*w_in, *w_out)


@_count(_OPERATORS.moe_mlp_backward, _OPERATORS.moe_mlp_backward_into)
def _moe_mlp_backward(_x: Shape, _weights: Shape, w_in: Any, w_out: Any, *rest: Any, **_: Any) -> int:
    _b_in, _b_out, _scales, maps, *_words, _grad, hidden, needs = rest[:11]
    need_x, _need_weights, *need_parameters = needs
    again = [w for w, h in zip(w_in, hidden, strict=True) if h[0] == 0]
    wanted = [w for w, needed in zip((*w_in, *w_out), need_parameters, strict=False) if needed]
    return _num_rows(maps) * _of_row(*w_out, *again, *wanted, *(w_in if need_x else ()))


@_count(_OPERATORS.grouped_linear)
def _grouped_linear(x_RK: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return x_RK[0] * _of_row(w)


@_count(_OPERATORS.frozen_linear)
def _frozen_linear(x_RK: Shape, *_: Any, out_shape: Shape, **__: Any) -> int:
    return x_RK[0] * _of_row((1, x_RK[1], out_shape[1]))


@_count(_OPERATORS.grouped_linear_weight_grad)
def _grouped_linear_weight_grad(_grad: Shape, x_RK: Shape, w: Shape, *_: Any, **__: Any) -> int:
    return x_RK[0] * _of_row(w)


@_count(_OPERATORS.adapted_linear)
def _adapted_linear(x: Shape, w: Shape, _: Shape, a: Shape, b: Shape, *__: Any, **___: Any) -> int:
    return x[0] * _of_row(w, a, b)


@_count(_OPERATORS.adapted_linear_backward)
def _adapted_linear_backward(_grad: Shape, x: Shape, *rest: Any, **_: Any) -> int:
    _low, w, _offsets, a, b, _scaling, needs_x = rest
    return x[0] * _of_row(a, b, b, *((w, a) if needs_x else ()))


@_count(_OPERATORS.router_linear, _OPERATORS.router_linear_split)
def _router_linear(x_TD: Shape, w_ED: Shape, *_: Any, **__: Any) -> int:
    return 2 * x_TD[0] * prod(w_ED)


@_count(_OPERATORS.router_linear_split_grads)
def _router_gradients(_grad: Shape, x_TD: Shape, w_ED: Shape, need_x: bool, need_w: bool, **_: Any) -> int:
    return (need_x + need_w) * 2 * x_TD[0] * prod(w_ED)


@_count(_OPERATORS.block_attention)
def _block_attention(q_BHSd: Shape, k_BhLd: Shape, v_BhLd: Shape, *_: Any, **__: Any) -> int:
    """FLOPs as in PyTorch's formula for attention: all pairs, masked or not."""
    return 2 * prod(q_BHSd[:3]) * k_BhLd[2] * (q_BHSd[3] + v_BhLd[3])


@_count(_OPERATORS.block_attention_backward)
def _block_attention_backward(
    _grad: Shape, _kept: Shape, q_BHSd: Shape, k_BhLd: Shape, v_BhLd: Shape, *_: Any, **__: Any
) -> int:
    """FLOPs of recomputed scores, two matmuls with values, and two with queries and keys."""
    return 2 * prod(q_BHSd[:3]) * k_BhLd[2] * (3 * q_BHSd[3] + 2 * v_BhLd[3])
