"""transformers' expert parallelism brings tokens to our experts: outputs and gradients are those of one process."""

import pytest
import torch
import torch.distributed as dist
from tests.oracle import numerics
from tests.support.hub_models import D, tiny_experts
from torch.distributed.device_mesh import DeviceMesh

EXPERTS = 4
PLAN = {"0": "ep_dispatch_experts"}


def draw():
    """The tokens of every rank are the same, and so is what happens to them."""
    generator = torch.Generator().manual_seed(7)
    x, dy = torch.randn(2, 6, D, generator=generator, dtype=torch.float64).unbind()
    ids = torch.rand(6, EXPERTS, generator=generator).topk(2).indices
    weights = torch.rand(6, 2, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), ids, weights.requires_grad_(), dy


def compare(name, implementation, one_choice=False):
    """With one choice, all tokens go to the first rank and the others' experts get none."""
    from transformers.distributed.expert_parallel import apply_expert_parallelism

    from expertmesh.integrations.transformers import register

    size, rank = dist.get_world_size(), dist.get_rank()
    whole = tiny_experts(name, torch.float64, num_experts=EXPERTS)
    x, ids, weights, dy = draw()
    if one_choice:
        ids = torch.zeros_like(ids)
    expected = whole(x, ids, weights)
    expected.backward(dy)
    module = torch.nn.Sequential(tiny_experts(name, torch.float64, num_experts=EXPERTS))
    module[0].config._experts_implementation = register()
    ep = DeviceMesh("cpu", list(range(size)), mesh_dim_names=("ep",))
    grid = DeviceMesh("cpu", torch.arange(size)[:, None], mesh_dim_names=("dp", "tp"))
    shares = one_choice or implementation == "all_reduce"  # a batch of all ranks
    names = [n for n, _ in module.named_parameters()]
    plan = dict.fromkeys(names, "grouped_gemm") | PLAN
    apply_expert_parallelism(module, ep, ep if shares else grid["tp"], plan, implementation)
    y_x, _, y_weights, _ = draw()
    y = module[0](y_x, ids, y_weights)
    y.backward(dy)
    numerics.assert_close_fp64(y.detach(), expected.detach(), what="y")
    numerics.assert_close_fp64(y_x.grad, x.grad, what="x")
    numerics.assert_close_fp64(y_weights.grad, weights.grad, what="weights")
    part = slice(rank * EXPERTS // size, (rank + 1) * EXPERTS // size)
    for (what, p), q in zip(module[0].named_parameters(), whole.parameters(), strict=True):
        # tokens of all ranks, which are the same ones, add up where they meet
        times = 1 if shares else size
        numerics.assert_close_fp64(p.grad.to_local(), times * q.grad[part], what=what)


@pytest.mark.parametrize("implementation", ["all_to_all", "all_reduce", "expertmesh"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_two_ranks(two_ranks, name, implementation):
    two_ranks.run(compare, name, implementation)


@pytest.mark.parametrize("implementation", ["all_to_all", "expertmesh"])
def test_four_ranks(four_ranks, implementation):
    four_ranks.run(compare, "qwen3_moe", implementation)


def test_a_rank_without_tokens_takes_part(two_ranks):
    two_ranks.run(compare, "qwen3_moe", "expertmesh", True)
