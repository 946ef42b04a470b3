"""`moe_mlp` as `torch.library` operators for autograd and torch.compile, forward and backward.

The operators take the arguments of `ExpertsCall.flat`. A list of one slice costs the host no more than a tensor
(docs/log.md), so whole weights have no operators of their own.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from expertmesh.ops.dtypes import without_autocast
from expertmesh.ops.experts.backends import BACKENDS
from expertmesh.ops.experts.call import FLAT, NUM_LISTS, ExpertsCall, make_experts_call
from expertmesh.ops.transforms import refuse_batched_gradient, refuse_second_derivative

_GRADIENTS = "Tensor grad_TD, Tensor[] hidden, bool[] needs"


def run(call: ExpertsCall, main: Sequence[Tensor], *, save_h: bool) -> Tensor:
    """Run the operator. Without save_h autograd saves x only; with `main` the backward adds to these buffers."""
    return _moe_mlp(*call.flat(), list(main), save_h)[0]


def forward(call: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    """Compute y and H of every slice by the backend that the call names."""
    y_TD, hidden = BACKENDS[call.backend].forward(call, save_h=save_h)
    return y_TD, hidden


def backward(
    call: ExpertsCall,
    grad_TD: Tensor,
    hidden: Sequence[Tensor],
    needs: Sequence[bool],
    main: Sequence[Tensor] = (),
) -> list[Tensor | None]:
    """Compute the gradients of `differentiable` by the backend that the call names."""
    found = BACKENDS[call.backend].backward
    assert found is not None
    return found(call, grad_TD.contiguous(), hidden, needs, main)


@torch.library.custom_op(
    "expertmesh::moe_mlp",
    mutates_args=(),
    schema=f"({FLAT}, Tensor[] main, bool save_h) -> Tensor[]",
)
def _moe_mlp(*args: Any) -> list[Tensor]:
    """Compute y and the pre-activations of every slice."""
    *fields, _, save_h = args
    call = make_experts_call(*fields)
    with without_autocast(call.x_TD.device):
        y_TD, hidden = forward(call, save_h=save_h)
    return [y_TD, *hidden]


@_moe_mlp.register_fake
def _(*args: Any) -> list[Tensor]:
    *fields, _, save_h = args
    call = make_experts_call(*fields)
    assert call.maps is not None
    num_rows = call.maps.token_of_row_N.shape[0] if save_h else 0
    shapes = (one.shape for one in call.experts.slices())
    hidden = [call.x_TD.new_empty(num_rows, G * F) for _, G, F, _ in shapes]
    return [call.x_TD.new_empty(call.x_TD.shape), *hidden]


@torch.library.custom_op(
    "expertmesh::moe_mlp_backward",
    mutates_args=(),
    schema=f"({FLAT}, {_GRADIENTS}) -> Tensor[]",
)
def _moe_mlp_backward(*args: Any) -> list[Tensor]:
    """Compute the gradients of `differentiable`; gradients that are not needed are empty."""
    *fields, grad_TD, hidden, needs = args
    call = make_experts_call(*fields)
    with without_autocast(call.x_TD.device):
        grads = backward(call, grad_TD, hidden, needs)
    # new tensors even when empty: outputs of one operator must not alias
    return [call.x_TD.new_empty(0) if grad is None else grad for grad in grads]


@_moe_mlp_backward.register_fake
def _(*args: Any) -> list[Tensor]:
    *fields, _, _, needs = args
    call, first_w_out = make_experts_call(*fields), 2 + len(fields[2])
    grads = []
    for i, (tensor, needed) in enumerate(zip(call.differentiable, needs, strict=True)):
        grad = tensor.new_empty(tensor.shape) if needed else call.x_TD.new_empty(0)
        if needed and BACKENDS[call.backend].is_triton and 2 <= i < first_w_out:
            from expertmesh.kernels.tiles import is_interleaved

            # the gradient is interleaved like the weight
            grad = torch.empty_like(tensor) if is_interleaved(tensor) else grad
        grads.append(grad)
    return grads


@torch.library.custom_op(
    "expertmesh::moe_mlp_backward_into",
    mutates_args=("main",),
    schema=f"({FLAT}, {_GRADIENTS}, Tensor(a!)[] main) -> (Tensor, Tensor)",
)
def _moe_mlp_backward_into(*args: Any) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x and of the routing weights; parameter gradients are added to `main`."""
    *fields, grad_TD, hidden, needs, main = args
    call = make_experts_call(*fields)
    with without_autocast(call.x_TD.device):
        d_x, d_weights, *_ = backward(call, grad_TD, hidden, needs, main)
    empty = call.x_TD.new_empty
    return empty(0) if d_x is None else d_x, empty(0) if d_weights is None else d_weights


@_moe_mlp_backward_into.register_fake
def _(*args: Any) -> tuple[Tensor, Tensor]:
    x, weights, needs = args[0], args[1], args[-2]
    return (
        x.new_empty(x.shape if needs[0] else 0),
        weights.new_empty(weights.shape if needs[1] else 0),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    *fields, main, _ = inputs
    x, weights, *lists = fields[: 2 + NUM_LISTS]
    ctx.words = fields[2 + NUM_LISTS :]
    lists.append(output[1:])
    ctx.lengths = [len(several) for several in lists]
    ctx.save_for_backward(x, weights, *chain(*lists))
    # not saved for backward: other micro-batches change the buffers between this forward and its backward
    ctx.main = list(main)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    saved = iter(ctx.saved_tensors)  # read once: activation checkpointing allows one read only
    x, weights = next(saved), next(saved)
    *lists, hidden = [list(islice(saved, length)) for length in ctx.lengths]
    fields = (x, weights, *lists, *ctx.words)
    refuse_batched_gradient("the backward of moe_mlp", grads[0])
    need_x, need_weights, *need_lists = ctx.needs_input_grad[:6]
    needs = [need_x, need_weights, *chain(*need_lists)]
    found: list[Tensor | None] = [None] * len(needs)
    if grads[0] is not None and ctx.main:
        found[:2] = _moe_mlp_backward_into(*fields, grads[0], hidden, needs, ctx.main)
        needs[2:] = [False] * (len(needs) - 2)
    elif grads[0] is not None:
        found = list(_moe_mlp_backward(*fields, grads[0], hidden, needs))
    given = iter([g if needed else None for g, needed in zip(found, needs, strict=True)])
    first = next(given), next(given)
    several = [list(islice(given, length)) for length in ctx.lengths[:4]]
    *_, num_scales, num_maps = ctx.lengths[:NUM_LISTS]
    rest = [None] * num_scales, [None] * num_maps, *[None] * len(ctx.words)
    return *first, *several, *rest, [None] * len(ctx.main), None


_moe_mlp.register_autograd(_gradients, setup_context=_setup_context)
refuse_second_derivative(
    _moe_mlp_backward,
    "moe_mlp",
    fix="use backend='reference' where one is needed (gradient penalties)",
)
