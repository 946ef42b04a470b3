"""Nothing in a step of a layer makes the host wait for a GPU, whatever its options; seen on tensors without values."""

import pytest
import torch
from tests.support.waits import waits

from expertmesh import MoELayer
from expertmesh.moe.routing_noise import key_noise

T, D = 300, 32
OPTIONS = {
    "plain": {},
    "cosine": {"router": "cosine"},
    "hash": {"router": "hash"},
    "experts choose": {"router": "expert_choice"},
    "noise": {"router_noise": "gumbel_after_first", "input_jitter": 0.1, "input_dropout": 0.1},
    "load": {"router_noise": "gaussian", "balance_loss": "importance_load", "z_loss_weight": 0.1},
    "groups": {"num_expert_groups": 4, "num_limited_groups": 2, "bias_update_rate": 0.1},
    "random drops": {"capacity_factor": 1.0, "normalize_weights": "kept"},
    "first drops": {"capacity_factor": 1.0, "drop_policy": "first", "routing_group_size": 64},
    "priority": {"capacity_factor": 1.0, "drop_policy": "priority", "routing_group_size": 64},
    "weight": {"capacity_factor": 1.0, "drop_policy": "weight", "balance_loss": "gshard"},
    "dense parts": {"num_shared_experts": 1, "shared_gate": True, "residual": True},
    "biases": {"bias": True, "expert_output_masking": 0.1, "recompute_h": True},
}


def empty(*size, dtype):
    return torch.empty(size, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_a_layer_never_waits(name, training, masked):
    sizes = {"dim": D, "hidden_dim": 48, "num_experts": 8, "top_k": 2, "backend": "triton"}
    layer = MoELayer(**sizes, **OPTIONS[name], seed=0, device="meta", dtype=torch.bfloat16)
    key_noise(layer.train(training), seed=0, step=0)
    x = empty(T, D, dtype=torch.bfloat16).requires_grad_()
    mask = empty(T, dtype=torch.bool) if masked else None
    with waits() as watch:
        y, stats = layer(x, token_mask=mask, token_ids=empty(T, dtype=torch.int64))
        (y.float().sum() + stats.aux_loss + stats.z_loss).backward()
        layer.update_expert_bias(stats.num_tokens_per_expert_E)
    assert watch.found == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1.0], device=x.device),
        lambda x: x.bincount(minlength=3),
        lambda x: torch.arange(2).to(x.device),
        lambda x: x.repeat_interleave(x, output_size=None),
    ],
)
def test_waits_are_seen(wait):
    x = empty(3, dtype=torch.int64)
    with waits() as watch:
        try:
            wait(x)
        except (RuntimeError, NotImplementedError):  # of values that are not there
            assert watch.found
    assert watch.found
