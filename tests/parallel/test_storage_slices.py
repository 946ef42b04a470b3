"""Slices of gathered experts are used and reduced where they lie: no copy joins or splits them."""

import functools

import pytest
import torch
from tests.support.operators import NewTensors
from tests.support.ranks import world_of

from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.dispatcher import spread_experts

DIM, HIDDEN, EXPERTS = 16, 64, 8


def num_elements(seen, smallest):
    """Elements of all memory that operators made, that of tensors below a size left out."""
    return sum(count for shape, count in seen.made if shape.numel() >= smallest)


def made(autocast, spread):
    """Elements of large results in the forward and in the backward, in units of the layer's experts."""
    layer = MoELayer(dim=DIM, hidden_dim=HIDDEN, num_experts=EXPERTS, top_k=1)
    whole = sum(p.numel() for p in layer.experts.parameters())
    spread_experts(layer, world_of(), route_degree=1, **spread)
    x = torch.randn(2, DIM, requires_grad=True)
    precision = functools.partial(torch.autocast, "cpu", enabled=autocast)
    with precision():  # groups and buffers of a first call
        layer(x)[0].sum().backward()
    layer.zero_grad(set_to_none=True)
    with NewTensors() as forward, precision():
        y = layer(x)[0]
    with NewTensors() as backward:
        y.sum().backward()
    return tuple(num_elements(seen, whole // 16) / whole for seen in (forward, backward))


INNER, OUTER = "experts_inner", "slices_inner"


@pytest.mark.parametrize("order", [INNER, OUTER])
def test_slices_of_two_ranks(two_ranks, order):
    """Forward: the gathered weights. Backward: beside the buffer of gradients, this rank's half of the sum."""
    for forward, backward in two_ranks.run(made, False, {"es_degree": 2, "order": order}):
        assert (forward, backward) == (1, 1 / 2)


def test_slices_and_parts_of_four_ranks(four_ranks):
    """Only where neighbours in a slice are no neighbours in rank order, the slices are copied, each once."""
    for forward, backward in four_ranks.run(made, False, {"es_degree": 2, "order": INNER}):
        assert (forward, backward) == (1, 1 / 4)
    for forward, backward in four_ranks.run(made, False, {"es_degree": 2, "order": OUTER}):
        assert (forward, backward) == (2, 1 + 1 / 4)


def test_autocast_gathers_half_the_bytes_and_sums_gradients_in_place(two_ranks):
    """BF16 weights, FP32 gradients: in the operator's own buffer, not in one of BF16 that is converted."""
    for forward, backward in two_ranks.run(made, True, {"es_degree": 1}):
        assert (forward, backward) == (1 + 1 / 2, 1 / 2)
