"""Decay groups, the learning rate as a function of the step, balancing of experts."""

import math

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from torch import nn

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import OptimConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.training.optim import balance_experts, build_optimizer, learning_rate


def model(**moe):
    config = ModelConfig(
        vocab_size=300,
        dim=16,
        num_layers=2,
        num_heads=2,
        ffn_hidden_dim=16,
        qk_norm=True,
        moe=MoEConfig(num_experts=(4,), hidden_dim=8, **moe),
    )
    return GPT(config, seed=0)


def test_matrices_are_decayed_and_nothing_else():
    net = model(bias=True, residual=True)
    optimizer = build_optimizer(net, OptimConfig(weight_decay=0.3))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(net.named_parameters())
    assert len(decay) == len(named)
    decayed = {name for name, p in named.items() if decay[id(p)]}
    assert {decay[id(p)] for p in named.values()} == {0.0, 0.3}
    leaves = {name.split(".", 2)[-1] for name in decayed if name.startswith("layers.0.")}
    assert leaves == {
        "attention.qkv.weight",
        "attention.out.weight",
        "moe.router.proj.weight",
        "moe.experts.w_in",
        "moe.experts.w_out",
        "moe.residual_mlp.w_in",
        "moe.residual_mlp.w_out",
        "moe.residual_coefficient.weight",
    }
    assert "embedding.weight" not in decayed


def test_frozen_parameters_are_left_out():
    net = model()
    net.embedding.requires_grad_(False)
    optimizer = build_optimizer(net, OptimConfig())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert id(net.embedding.weight) not in held


def test_the_update_is_adamw_by_hand():
    weight = nn.Parameter(torch.tensor([[0.5, -0.25]], dtype=torch.float64))
    holder = nn.Module()
    holder.register_parameter("w", weight)
    config = OptimConfig(lr=0.1, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2)
    optimizer = build_optimizer(holder, config)
    w, m, v = weight.detach().clone(), 0.0, 0.0
    for t in (1, 2, 3):
        gradient = torch.tensor([[0.3 * t, -0.7]], dtype=torch.float64)
        weight.grad = gradient.clone()
        optimizer.step()
        w = w * (1 - 0.1 * 0.2)
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        w = w - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-3)
    assert_close_fp64(weight, w, what="weights after three steps")


COSINE = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1)
WSD = OptimConfig(lr=2.0, warmup_steps=4, min_lr_ratio=0.1, schedule="wsd", decay_fraction=0.25)


@pytest.mark.parametrize("config", [COSINE, WSD])
def test_warm_up_is_a_line_and_the_end_is_the_smallest_rate(config):
    rates = [learning_rate(s, total_steps=20, config=config) for s in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert math.isclose(rates[-1], 0.2) and max(rates) == 2.0
    assert learning_rate(50, total_steps=20, config=config) == rates[-1]
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))


def test_cosine_by_its_formula():
    for step in range(4, 20):
        p = (step - 4) / 15
        expected = 0.2 + 1.8 * (1 + math.cos(math.pi * p)) / 2
        assert math.isclose(learning_rate(step, total_steps=20, config=COSINE), expected)


def test_wsd_is_stable_and_then_a_line():
    rates = [learning_rate(s, total_steps=20, config=WSD) for s in range(20)]
    assert rates[4:16] == [2.0] * 12
    steps = [a - b for a, b in zip(rates[15:-1], rates[16:], strict=True)]
    assert all(math.isclose(s, 1.8 / 4) for s in steps)


def test_no_warm_up_and_one_step():
    config = OptimConfig(lr=1.0, warmup_steps=0)
    assert learning_rate(0, total_steps=1, config=config) == 1.0
    assert learning_rate(0, total_steps=10, config=config) == 1.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize(
    "warmup, total, expected",
    [(0, 1, [1.0]), (0, 2, [1.0, 0.1]), (1, 2, [1.0, 0.1]), (2, 2, [0.5, 1.0]), (2, 3, [0.5, 1.0, 0.1])],
)  # fmt: skip
def test_schedules_of_few_steps(schedule, warmup, total, expected):
    """A decay that rounds to no step has one all the same, and what comes after the schedule has the last rate."""
    config = OptimConfig(lr=1.0, warmup_steps=warmup, schedule=schedule)
    rates = [learning_rate(s, total_steps=total, config=config) for s in range(total + 2)]
    assert rates == pytest.approx([*expected, expected[-1], expected[-1]])


def test_balancing_moves_the_bias_against_the_load():
    net = model(bias_update_rate=0.5)
    counts = [torch.tensor([10, 0, 2, 4]), torch.tensor([1, 1, 1, 1])]
    balance_experts(net, counts)
    biases = [layer.moe.expert_bias_E.tolist() for layer in net.layers]
    assert biases == [[-0.5, 0.5, 0.5, 0.0], [0.0] * 4]
