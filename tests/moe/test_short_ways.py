"""Ways that only calls without masks, gradients or compilers take: to the bit the general ones."""

import re
from unittest.mock import patch

import pytest
import torch

from expertmesh.moe import capacity
from expertmesh.ops import route_metadata, router_linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_router_without_gradients_skips_the_operator(dtype):
    x_TD, w_ED = torch.randn(5, 16).to(dtype), torch.randn(8, 16, requires_grad=True)
    found = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), torch.profiler.profile(acc_events=True) as profile:
            found.append(router_linear.router_linear(x_TD, w_ED))
        names = " ".join(event.name for event in profile.events())  # with _default in torch 2.14
        assert bool(re.search("expertmesh(::|_)router_linear", names)) == gradients
    seen, plain = found
    assert torch.equal(seen, plain)
    assert seen.requires_grad


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("group_size", [None, 4])
def test_choices_are_counted_alike(group_size, backend):
    class Subclass(torch.Tensor):
        """Of which nothing is known, so that the general way is taken."""

    ids_TK = torch.randint(0, 6, (11, 2))
    plain = capacity.count_choices(ids_TK, 5, group_size)
    with (
        patch.object(capacity, "resolve_backend", return_value=backend),
        patch.object(route_metadata, "resolve_backend", return_value=backend),
    ):
        general = capacity.count_choices(ids_TK.as_subclass(Subclass), 5, group_size)
    assert torch.equal(plain, general)
    assert plain.sum() == (ids_TK < 5).sum()
    assert plain.dtype == general.dtype == torch.int64
