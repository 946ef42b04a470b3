"""Whole models change their plan, K and capacity from one forward to the next, and lose nothing and move nothing
else."""

import pytest
import torch
from tests.oracle.numerics import FP64_RELATIVE, relative_error

from expertmesh.comm.world import World
from expertmesh.config.dispatch_options import DispatchOptions
from expertmesh.config.run import ParallelConfig
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.clip import clip_grad_norm_

B, S = 4, 8
ELEMENT = 8
PYRAMID = (4, 8)
FACTORS = (0.5, 1.0, float("inf"))


def small(**changes):
    values = {
        "model.dim": 16,
        "model.max_seq_len": S,
        "data.seq_len": S,
        "model.moe.hidden_dim": 16,
        "model.moe.num_experts": PYRAMID,
        "model.moe.routing_group_size": S,
        "model.moe.router_noise": "gumbel",
    }
    model = RECIPES["gpt-moe-test"]().updated(values | changes).model
    # counts in the calls that bring a capacity, which a run's configuration does not know
    moe = model.moe.model_copy(update={"min_capacity": 1})
    return model.model_copy(update={"moe": moe})


def build(config):
    return GPT(config, dtype=torch.float64, seed=1)


def backward(model, ids, rows, step, **choices):
    """Loss of these rows of a batch, of which the batch's is the sum."""
    key_noise(model, seed=2, step=step)
    index = torch.arange(rows.start * S, rows.stop * S)
    output = model(ids[rows], token_index=index, **choices)
    loss = output.logits_BSV.square().mean(-1).sum() / (B * S)
    share = (rows.stop - rows.start) / B
    loss = loss + share * sum(stats.aux_loss for stats in output.stats)
    loss.backward()
    return output.logits_BSV.detach()


def switch_every_step(parallel, num_steps):
    """Largest relative errors of logits and of gradient norms, bytes of weights that moved, and those of the
    formula."""
    world, config = World(), small()
    whole, spread = build(config), build(config)
    parallelize_gpt(spread, ParallelConfig(**parallel), world=world)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in (whole, spread)]
    follow_optimizer(spread, optimizers[1])
    W = world.size // parallel.get("dp_replicate_degree", 1)
    experts = [3 * 16 * 16 * E for E in PYRAMID]  # elements of w_in and w_out
    draw, p = torch.Generator().manual_seed(5), world.position
    errors, moved, expected = [], 0, 0
    for step in range(num_steps):
        route = 2 ** int(torch.randint(0, W.bit_length(), (), generator=draw))
        top_k = int(torch.randint(1, 4, (), generator=draw))
        factor = FACTORS[int(torch.randint(0, 3, (), generator=draw))]
        choices = {"top_k": top_k, "capacity_factor": factor}
        ids = torch.randint(0, 512, (B, S), generator=draw)
        logits = backward(whole, ids, slice(0, B), step, **choices)
        with world.traffic.logged() as log:
            how = DispatchOptions(route_degree=route)
            mine = backward(spread, ids, slice(p, p + 1), step, dispatch=how, **choices)
        moved += log.num_bytes(where="weight")
        gathers = 1 if parallel["zero_stage"] < 3 else 2
        expected += sum((gathers + 1) * (W // route - 1) * (n // W) * ELEMENT for n in experts)
        if world.size > W:  # gradients are summed over copies, of which there are two
            expected += sum(n // W * ELEMENT for n in experts)
        errors.append(relative_error(mine, logits[p : p + 1]))
        norms = [torch.nn.utils.get_total_norm(q.grad for q in whole.parameters())]
        norms.append(clip_grad_norm_(spread.parameters(), float("inf")))
        errors.append(relative_error(norms[1], norms[0]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    world.close()
    return max(errors), moved, expected


@pytest.mark.parametrize(
    ("parallel", "count"),
    [
        ({"zero_stage": 3, "es_degree": 2}, 10),
        ({"zero_stage": 2}, 4),
        ({"zero_stage": 1, "dp_replicate_degree": 2}, 4),
    ],
    ids=str,
)
def test_switches(four_ranks, parallel, count):
    """A gather brings the shards of W / r - 1 others; the gradient goes back once; nothing else of the weights
    moves."""
    for error, moved, expected in four_ranks.run(switch_every_step, parallel, count):
        assert error <= FP64_RELATIVE
        assert moved == expected > 0
