"""The DeepSpeed door on two ranks without DeepSpeed: slices of experts, and files of ranks before the experts are
spread."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.oracle.numerics import assert_close_fp64
from torch import nn

from expertmesh.integrations.deepspeed import MoE

D, E, ROWS = 8, 4, 6


class Tanh(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(D, 6), nn.Linear(6, D)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def layer_of(kind, **options):
    torch.manual_seed(0)
    expert = Tanh() if kind == "modules" else nn.Sequential(nn.Linear(D, 6), nn.GELU(), nn.Linear(6, D))
    moe = MoE(D, expert, num_experts=E, k=2, drop_tokens=False, top2_2nd_expert_sampling=False, **options).double()
    with torch.no_grad():  # experts begin equal
        for parameter in moe.deepspeed_moe.experts.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return moe


def tokens():
    return torch.randn(2, ROWS, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def sliced():
    """This rank's output, and gradients of the whole experts."""
    moe = layer_of("grouped", enable_expert_tensor_parallelism=True)
    moe.set_deepspeed_parallelism()
    y, _, _ = moe(tokens()[dist.get_rank()])
    y.square().sum().backward()
    experts = dict(moe.deepspeed_moe.experts.named_parameters())
    assert experts["w_in"].to_local().shape == (E, 1, 3, D)
    return y.detach(), {name: p.grad.full_tensor() for name, p in experts.items()}


def test_ranks_with_copies_hold_slices_instead(two_ranks):
    moe = layer_of("grouped")
    outputs = [moe(x)[0] for x in tokens()]
    (sum(y.square().sum() for y in outputs) / 2).backward()
    expected = {name: p.grad for name, p in moe.deepspeed_moe.experts.named_parameters()}
    for rank, (y, grads) in enumerate(two_ranks.run(sliced)):
        assert_close_fp64(y, outputs[rank].detach(), what="y")
        for name, grad in grads.items():
            assert_close_fp64(grad, expected[name], what=name)


def from_a_file_of_the_rank(kind):
    """Output of a layer whose state dict has the experts of this rank alone, as DeepSpeed's has."""
    whole = layer_of(kind).state_dict()
    begin, first = "deepspeed_moe.experts.deepspeed_experts.", 2 * dist.get_rank()
    own = {name: values for name, values in whole.items() if not name.startswith(begin)}
    for name in whole.keys() - own.keys():
        expert, _, rest = name.removeprefix(begin).partition(".")
        if int(expert) in (first, first + 1):
            own[f"{begin}{int(expert) - first}.{rest}"] = whole[name]
    moe = layer_of(kind, ep_size=2)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.zero_()
    moe.load_state_dict(own)
    moe.set_deepspeed_parallelism()
    with torch.no_grad():
        return moe(tokens()[dist.get_rank()])[0]


@pytest.mark.parametrize("kind", ["grouped", "modules"])
def test_files_of_ranks_load_before_the_experts_are_spread(kind, two_ranks):
    moe = layer_of(kind)
    for rank, y in enumerate(two_ranks.run(from_a_file_of_the_rank, kind)):
        assert_close_fp64(y, moe(tokens()[rank])[0].detach(), what=kind)


def gradients(kind, way):
    """Gradients of this rank's experts, of a layer whose parameters others took the place of."""
    moe = layer_of(kind, ep_size=2)
    moe.requires_grad_(way != "thawed")
    moe.set_deepspeed_parallelism()
    moe.requires_grad_(True)
    if way == "deepcopy":
        moe = copy.deepcopy(moe)
    if way == "assign":
        moe.load_state_dict({name: value.clone() for name, value in moe.state_dict().items()}, assign=True)
    moe(tokens()[dist.get_rank()])[0].square().sum().backward()
    grads = {name: p.grad for name, p in moe.deepspeed_moe.experts.named_parameters()}
    return {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in grads.items()}


@pytest.mark.parametrize("way", ["thawed", "assign", "deepcopy"])
@pytest.mark.parametrize("kind", ["grouped", "modules"])
def test_gradients_are_means_where_parameters_were_replaced_or_frozen(kind, way, two_ranks):
    moe = layer_of(kind)
    (sum(moe(x)[0].square().sum() for x in tokens()) / 2).backward()
    expected = {name: p.grad for name, p in moe.deepspeed_moe.experts.named_parameters()}
    found = {}
    for grads in two_ranks.run(gradients, kind, way):
        found |= grads
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert_close_fp64(grad, expected[name], what=name)
