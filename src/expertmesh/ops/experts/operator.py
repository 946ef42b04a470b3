"""`moe_mlp` as a pair of `torch.library` operators: what autograd and torch.compile see.

Both take the fields of an `ExpertsCall`. A list of one slice costs the host no more than a tensor (docs/log.md), so whole
weights have no operators of their own.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.transforms import refuse_batched_gradient, refuse_second_derivative

_CALL = (
    "Tensor x_TD, Tensor weights_TK, Tensor[] w_in, Tensor[] w_out, Tensor[] b_in, Tensor[] b_out, Tensor[] maps, "
    "str activation, str backend"
)
_GRADIENTS = "Tensor grad_TD, Tensor[] hidden, bool[] needs"
FORWARD = f"({_CALL}, Tensor[] main, bool save_h) -> Tensor[]"
"""Schema of an operator that gives y and the pre-activations of every slice."""


def run(call: ExpertsCall, main: Sequence[Tensor], *, save_h: bool) -> Tensor:
    """Run the operator; without save_h autograd saves x only, with `main` the backward adds to these buffers."""
    return _moe_mlp(*call, list(main), save_h)[0]


@torch.library.custom_op("expertmesh::moe_mlp", mutates_args=(), schema=FORWARD)
def _moe_mlp(*args: Any) -> list[Tensor]:
    *fields, _, save_h = args
    call = ExpertsCall(*fields)
    with without_autocast(call.x_TD.device):
        y_TD, hidden = call.forward(save_h=save_h)
    return [y_TD, *hidden]


@_moe_mlp.register_fake
def shapes(*args: Any) -> list[Tensor]:
    """Results of an operator with the schema FORWARD, without values."""
    *fields, _, save_h = args
    call = ExpertsCall(*fields)
    hidden = without_rows(call, call.maps[1].shape[0] if save_h else 0)
    return [call.x_TD.new_empty(call.x_TD.shape), *hidden]


def without_rows(call: ExpertsCall, num_rows: int = 0) -> list[Tensor]:
    """H of every slice, not filled; without rows the backward computes it again."""
    return [call.x_TD.new_empty(num_rows, w.shape[1] * w.shape[2]) for w in call.w_in]


@torch.library.custom_op(
    "expertmesh::moe_mlp_backward",
    mutates_args=(),
    schema=f"({_CALL}, {_GRADIENTS}) -> Tensor[]",
)
def _moe_mlp_backward(*args: Any) -> list[Tensor]:
    """The gradients of `differentiable`; those not wanted are empty."""
    *fields, grad_TD, hidden, needs = args
    call = ExpertsCall(*fields)
    with without_autocast(call.x_TD.device):
        grads = call.backward(grad_TD.contiguous(), hidden, needs)
    # fresh tensors even when empty: outputs of one operator may not be the same tensor
    return [call.x_TD.new_empty(0) if grad is None else grad for grad in grads]


@_moe_mlp_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    *fields, _, _, needs = args
    call, first_w_out = ExpertsCall(*fields), 2 + len(fields[2])
    grads = []
    for i, (tensor, needed) in enumerate(zip(call.differentiable, needs, strict=True)):
        grad = tensor.new_empty(tensor.shape) if needed else call.x_TD.new_empty(0)
        if needed and call.backend == "triton" and 2 <= i < first_w_out:
            from expertmesh.kernels.tiles import is_interleaved

            # the gradient is interleaved like the weight
            grad = torch.empty_like(tensor) if is_interleaved(tensor) else grad
        grads.append(grad)
    return grads


@torch.library.custom_op(
    "expertmesh::moe_mlp_backward_into",
    mutates_args=("main",),
    schema=f"({_CALL}, {_GRADIENTS}, Tensor(a!)[] main) -> (Tensor, Tensor)",
)
def _moe_mlp_backward_into(*args: Any) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the routing weights; those of the parameters are added to `main`."""
    *fields, grad_TD, hidden, needs, main = args
    call = ExpertsCall(*fields)
    with without_autocast(call.x_TD.device):
        d_x, d_weights, *_ = call.backward(grad_TD.contiguous(), hidden, needs, main)
    empty = call.x_TD.new_empty
    return empty(0) if d_x is None else d_x, empty(0) if d_weights is None else d_weights


@_moe_mlp_backward_into.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x, weights, needs = args[0], args[1], args[-2]
    return (
        x.new_empty(x.shape if needs[0] else 0),
        weights.new_empty(weights.shape if needs[1] else 0),
    )


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    """Save what `gradients` needs of an operator with the schema FORWARD."""
    *fields, main, _ = inputs
    x, weights, *lists, ctx.activation, ctx.backend = fields
    lists.append(output[1:])
    ctx.lengths = [len(several) for several in lists]
    ctx.save_for_backward(x, weights, *chain(*lists))
    # not saved: micro-batches change them between this forward and its backward, which is what they are for
    ctx.main = list(main)
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    """The backward of an operator with the schema FORWARD."""
    saved = iter(
        ctx.saved_tensors
    )  # read once: activation checkpointing lets nobody read them again
    x, weights = next(saved), next(saved)
    *lists, hidden = [list(islice(saved, length)) for length in ctx.lengths]
    fields: list[Any] = [x, weights, *lists, ctx.activation, ctx.backend]
    call = ExpertsCall(*fields)
    refuse_batched_gradient("the backward of moe_mlp", grads[0])
    need_x, need_weights, *need_lists = ctx.needs_input_grad[:6]
    needs = [need_x, need_weights, *chain(*need_lists)]
    found: list[Tensor | None] = [None] * len(needs)
    if grads[0] is not None and ctx.main:
        found[:2] = _moe_mlp_backward_into(*call, grads[0], hidden, needs, ctx.main)
        needs[2:] = [False] * len(call.parameters)
    elif grads[0] is not None:
        found = list(_moe_mlp_backward(*call, grads[0], hidden, needs))
    given = iter([g if needed else None for g, needed in zip(found, needs, strict=True)])
    first = next(given), next(given)
    several = [list(islice(given, length)) for length in ctx.lengths[:4]]
    return *first, *several, [None] * len(call.maps), None, None, [None] * len(ctx.main), None


_moe_mlp.register_autograd(gradients, setup_context=setup_context)
refuse_second_derivative(
    _moe_mlp_backward,
    "moe_mlp",
    fix="use backend='reference' where one is needed (gradient penalties)",
)
