"""Worlds of 64 and 512 ranks on torch's fake process group, in which one process plays any rank and nothing is sent.

Parts and groups are those of the real code. The forward and the backward use exchanges of fixed size, because a fake
group brings no counts from which the ragged ones would learn their sizes.
"""

import contextlib
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from tests.support.rank_memory import memory_of_rank
from torch.testing._internal.distributed.fake_pg import FakeStore

from expertmesh.comm.world import World
from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import ParallelConfig
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.experts.exchange import Fixed

TWO_PERCENT = 0.02
B, S = 2, 16
LAYOUTS = {
    "E": {},
    "E+D by copies": {"dp_replicate_degree": 4},
    "E+D by route": {"route_degree": 8},
    "E+Z1, tokens stay": {"zero_stage": 1, "route_degree": 1},
    "E+Z2": {"zero_stage": 2, "route_degree": 16},
    "sliced": {"es_degree": 8, "expert_order": "experts_inner"},
    "sliced, middle route": {"es_degree": 16, "route_degree": 32},
    "E+D+M": {"tp_degree": 2, "dp_replicate_degree": 2},
    "E+Z-Offload+M": {"zero_stage": 2, "offload": True, "tp_degree": 2},
    "E+D+Z+M": {"tp_degree": 4, "dp_replicate_degree": 4, "zero_stage": 2, "route_degree": 4},
}


@contextlib.contextmanager
def rank_of(num_ranks, rank):
    """A world of so many ranks, seen from one of them; and how often torch was asked for a group."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    asked, new_group = [], dist.new_group

    def counting(ranks=None, **options):
        asked.append(ranks)
        return new_group(ranks, **options)

    dist.new_group = counting
    world = World()
    try:
        yield world, asked
    finally:
        dist.new_group = new_group
        world.close()
        dist.destroy_process_group()


def model_config(num_experts, *, dim, hidden_dim, vocab_size):
    return ModelConfig(
        vocab_size=vocab_size,
        max_seq_len=S,
        dim=dim,
        num_layers=4,
        num_heads=8,
        ffn_hidden_dim=hidden_dim,
        moe_every=2,
        moe=MoEConfig(
            num_experts=(num_experts,),
            hidden_dim=hidden_dim,
            num_shared_experts=1,
            residual=True,
        ),
    )


def large(num_experts):
    return model_config(num_experts, dim=1024, hidden_dim=2048, vocab_size=32768)


def small(num_experts):
    return model_config(num_experts, dim=16, hidden_dim=64, vocab_size=32)


def spread(config, parallel, world, *, device):
    model = GPT(config, device=device, seed=0)
    parallelize_gpt(model, parallel, world=world)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("num_ranks", "num_experts"),
    [(64, 8), (512, 1024)] + [pytest.param(n, 64, marks=pytest.mark.exhaustive) for n in (64, 512)],
)
def test_parts_and_groups(num_ranks, num_experts, layout):
    """On the meta device: bytes of a rank are those of the formula, and groups are few."""
    parallel, config = ParallelConfig(**LAYOUTS[layout]), large(num_experts)
    expected = memory_of_rank(config, parallel, num_ranks)
    W = num_ranks // parallel.dp_replicate_degree
    f = parallel.es_degree or W // math.gcd(num_experts, W)
    for rank in (0, num_ranks // 2 + 1):
        with rank_of(num_ranks, rank) as (world, asked):
            model = spread(config, parallel, world, device="meta")
            held = sum(p.to_local().nbytes for p in model.parameters())
            assert held == pytest.approx(expected.weights_bytes, rel=TWO_PERCENT)
            assert all(p.is_meta for p in model.parameters())
            for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
                w_in = layer.experts.w_in
                assert w_in.shape == (num_experts, 2, 2048, 1024)
                assert w_in.to_local().shape == (num_experts // (W // f), 2, 2048 // f, 1024)
                storage = layer.dispatcher.storage
                assert storage.num_replicas == parallel.dp_replicate_degree
                assert layer.dispatcher.exchange().route.group.size == (parallel.route_degree or W)
            # Each rank makes the groups of a few partitions of all ranks, not of every layer.
            assert len(asked) <= 4 * num_ranks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("num_ranks", "num_experts"), [(64, 8), (512, 1024)])
def test_forward_and_backward(num_ranks, num_experts, layout):
    parallel, config = ParallelConfig(**LAYOUTS[layout]), small(num_experts)
    with rank_of(num_ranks, num_ranks - 1) as (world, _):
        model = spread(config, parallel, world, device="cpu")
        for layer in (m for m in model.modules() if isinstance(m, MoELayer)):
            bound = B * S // parallel.tp_degree
            layer.dispatcher.exchanges = partial(Fixed, bound=bound)
        with world.traffic.logged() as log:
            output = model(torch.zeros(B, S, dtype=torch.int64))
            output.logits_BSV.sum().backward()
        assert output.logits_BSV.shape == (B, S // parallel.tp_degree, 32)
        for parameter in model.parameters():
            assert parameter.grad.to_local().shape == parameter.to_local().shape
        moves = {t.collective for t in log.transfers if "dispatch" in t.where}
        assert bool(moves) == (parallel.route_degree != 1)
