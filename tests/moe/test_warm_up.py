"""After warm_up no number of tokens compiles anything: what Triton compiles a kernel for is among what was launched."""

from unittest import mock

import pytest
import torch
from tests.support.launches import as_on, recorded_launches

from expertmesh import ConfigError, MoELayer, functional
from expertmesh.kernels import (
    combine,
    moe_backward,
    moe_forward,
    moe_wgrad,
    route_metadata,
    split_product,
    split_rows,
    topk,
)

MODULES = (
    combine, moe_backward, moe_forward, moe_wgrad, split_rows, route_metadata, split_product, topk,
)  # fmt: skip


def make(**options):
    options = {"dim": 32, "hidden_dim": 48, "num_experts": 4, "top_k": 2} | options
    return MoELayer(**options, seed=0, backend="triton", dtype=torch.bfloat16)


def compiled_for(run):
    """What Hopper would compile in a run: launches do nothing, so that results are the zeros of fresh memory."""
    zeros = mock.patch.object(torch, "empty", torch.zeros)
    with as_on("sm_90"), zeros, recorded_launches(*MODULES) as launches:
        run()
    return {launch.key for launch in launches}


@pytest.mark.parametrize("training", [True, False])
def test_warm_sizes_compile_nothing(training):
    layer = make().train(training)
    counts = (1, 3, 23, 40, 77, 200, 256, 333, 600)
    warm = compiled_for(lambda: functional.warm_up(layer, (1, 600)))

    def steps():
        for count in counts:
            x = torch.randn(count, 32, dtype=torch.bfloat16, requires_grad=training)
            with torch.set_grad_enabled(training):
                y, stats = layer(x)
            if training:
                (y.float().sum() + stats.aux_loss).backward()

    assert compiled_for(steps) <= warm
    cold = compiled_for(lambda: functional.warm_up(layer, [1]))
    assert not warm <= cold


def test_gradients_and_buffers_stay_as_they_are():
    sizes = {"dim": 8, "hidden_dim": 8, "num_experts": 4, "top_k": 2, "bias": True}
    layer = MoELayer(**sizes, bias_update_rate=0.1, seed=0)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.experts.accumulate_main_grads()
    functional.warm_up(layer, [0, 1, 5])
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert all(p.grad is None for p in layer.parameters())
    assert not any(buffer.any() for buffer in vars(layer.experts.main_grads).values())


def test_tokens_are_where_offloaded_experts_are_computed():
    layer = MoELayer(dim=8, hidden_dim=8, num_experts=4, top_k=2, seed=0)
    layer.experts.compute_device = torch.device("meta")
    seen = []
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].device.type))
    with pytest.raises(RuntimeError):  # of weights that nobody has brought there
        functional.warm_up(layer, [3])
    assert seen == ["meta"]


def test_a_negative_count_is_refused():
    with pytest.raises(ConfigError, match="token_counts holds -1"):
        functional.warm_up(make(), [4, -1])
