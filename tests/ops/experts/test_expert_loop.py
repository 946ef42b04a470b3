"""Few rows per expert, as in decoding: the ways that only the CPU's forward takes."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.poison import poisoned_empty

from expertmesh.functional import moe_mlp, route_metadata
from expertmesh.ops.experts import torch_forward as expert_loop


def make_call(*, num_tokens, num_experts, top_k, dim, hidden_dim, dtype):
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    ids_TK = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(num_tokens)])
    tensors = (
        randn(num_tokens, dim),
        randn(num_experts, 2, hidden_dim, dim),
        randn(num_experts, dim, hidden_dim),
        torch.rand(num_tokens, top_k, generator=generator),
    )
    return tensors, route_metadata(ids_TK, num_experts)


def run(tensors, metadata, dtype, backend):
    x, w_in, w_out, weights = tensors
    cast = (x.to(dtype), w_in.to(dtype), w_out.to(dtype))
    return moe_mlp(
        *cast,
        weights.to(torch.float64 if dtype == torch.float64 else torch.float32),
        metadata,
        activation="swiglu",
        backend=backend,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 2, 5, 40])
@pytest.mark.parametrize("limit", [0, 3000, 1 << 20])
def test_runs_of_experts_without_gradients(threshold, dtype, num_tokens, limit):
    tensors, metadata = make_call(num_tokens=num_tokens, num_experts=6, top_k=2, dim=32, hidden_dim=48, dtype=dtype)
    threshold(expert_loop, "FEW_ELEMENTS", limit)
    with torch.no_grad():
        with poisoned_empty():
            ours = run(tensors, metadata, dtype, "torch")
        plain = run(tensors, metadata, dtype, "reference")
        exact = run(tensors, metadata, torch.float64, "reference")
    assert_two_times(ours, plain, exact, what="y", dtype=dtype)
