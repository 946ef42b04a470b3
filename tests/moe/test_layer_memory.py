"""What the layer keeps for its backward, recomputation of H, and the phases that a profile shows."""

import pytest
import torch
from tests.support.memory import saved_bytes
from torch.profiler import ProfilerActivity, profile

from expertmesh import MoELayer
from expertmesh.moe.phases import PHASES

SHAPES = [(512, 64, 96, 8, 2), (700, 128, 160, 16, 1), (256, 96, 64, 32, 8)]
ONE_PERCENT = 100


def make(shape, dtype=torch.float32, **options):
    _, D, F, E, K = shape
    return MoELayer(dim=D, hidden_dim=F, num_experts=E, top_k=K, seed=0, dtype=dtype, **options)


def tokens(shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape[0], shape[1], generator=generator).to(dtype).requires_grad_()


def documented_bytes(shape, itemsize, *, recompute_h=False):
    """The formula of docs/kernels.md."""
    T, D, F, E, K = shape
    elements = T * D + (0 if recompute_h else 2 * T * K * F)
    metadata = 4 * (E + 1 + 3 * T * K)
    normalised = K > 1
    routing = T * (4 * E + 8 * K + 4 * K + (5 * K + 8 if normalised else 0))
    return elements * itemsize + metadata + routing


@pytest.mark.parametrize("recompute_h", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_saves_x_and_h_and_metadata_and_routing(shape, dtype, recompute_h):
    layer, x = make(shape, dtype, recompute_h=recompute_h), tokens(shape, dtype)
    found = saved_bytes(lambda: layer(x), parameters=layer.parameters())
    expected = documented_bytes(shape, dtype.itemsize, recompute_h=recompute_h)
    assert abs(found - expected) * ONE_PERCENT <= expected


def test_a_profile_shows_the_phases():
    shape = SHAPES[0]
    layer = make(shape)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as seen:
        layer(tokens(shape))
    events = {event.key: event.count for event in seen.key_averages()}
    assert {name: events.get(f"expertmesh::moe::{name}") for name in PHASES} == dict.fromkeys(PHASES, 1)


def test_phases_leave_no_graph_break_and_need_no_recompilation():
    shape = (16, 8, 12, 4, 2)
    layer = make(shape)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, _ = layer(tokens(shape))
    assert torch.equal(compiled(tokens(shape))[0], expected)
    with (
        torch.compiler.set_stance("fail_on_recompile"),
        profile(activities=[ProfilerActivity.CPU], acc_events=True),
    ):
        assert torch.equal(compiled(tokens(shape))[0], expected)
