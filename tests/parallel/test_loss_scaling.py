"""FP16 on several ranks: one scale for all, gradients of one process, and an overflow anywhere skips the step
everywhere."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times
from tests.support.ranks import world_of
from tests.support.replicas import dense_or_moe, trainer_steps, whole
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.ranks import Ranks
from expertmesh.parallel.scaler import LossScaler

B, S = 8, 16
MODEL = {
    "model.dim": 16,
    "model.max_seq_len": S,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "data.seq_len": S,
    "train.batch_size": B,
    "train.device": "cpu",
    "optim.grad_clip": 1e9,
}
LAYOUTS = [
    {"dp_replicate_degree": 2, "zero_stage": 2},
    {"tp_degree": 2, "es_degree": 2, "offload": True},
]


def training(dtype, parallel, model_changes, *, steps, before=None):
    """Steps on all ranks (parallel None: one process); yields the model, the scaler and the result after each."""
    config = RECIPES["gpt-moe-test"]().updated(
        dense_or_moe(MODEL, model_changes)
        | {"train.dtype": dtype}
        | {f"parallel.{name}": value for name, value in (parallel or {}).items()}
    )
    alone = parallel is None
    ranks = Ranks() if alone else Ranks(world_of(), tp_degree=parallel.get("tp_degree", 1))
    return trainer_steps(config, ranks, steps, **({"before": before} if before else {}))


def overflow_on_rank_1(step, model, scaler):
    if world_of().position == 1:
        stock = scaler.scale
        scaler.scale = lambda loss: stock(loss) * torch.inf


def gradients(parallel):
    """Of a dense model, whose FP16 and FP64 versions choose the same experts."""
    dense = {"model.moe.num_experts": ()}
    parallel = {name: value for name, value in parallel.items() if name != "es_degree"}
    found = []
    for dtype, layout in (("float16", parallel), ("float16", None), ("float64", None)):
        ((model, _, result),) = training(dtype, layout, dense, steps=1)
        named = {name: whole(p.grad).cpu() for name, p in model.named_parameters()}
        found.append({"loss": torch.tensor(result.loss)} | named)
    return found


def losses(parallel):
    """Five steps of a model with experts."""
    return [
        torch.tensor([result.loss for *_, result in training(dtype, layout, {}, steps=5)])
        for dtype, layout in (("float16", parallel), ("float16", None), ("float64", None))
    ]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_and_losses_are_those_of_one_process(four_ranks, layout):
    for ours, plain, oracle in four_ranks.run(gradients, layout):
        for name, value in oracle.items():
            assert_two_times(ours[name], plain[name], value, what=name, dtype=torch.float16)
    for ours, plain, oracle in four_ranks.run(losses, layout):
        assert_two_times(ours, plain, oracle, what="losses", dtype=torch.float16)


def overflow_on_one_rank():
    """A shard of rank 1 alone is not finite: two meshes and a plain parameter in one optimizer."""
    ranks = world_of()
    spread = ranks.mesh((ranks.size,), ("dp",), range(ranks.size))
    copied = ranks.mesh((1, ranks.size), ("a", "b"), range(ranks.size))
    parameters = [
        nn.Parameter(torch.ones(3)),
        nn.Parameter(DTensor.from_local(torch.ones(2), spread, [Shard(0)])),
        nn.Parameter(DTensor.from_local(torch.ones(2), copied, [Replicate(), Shard(0)])),
    ]
    optimizer = torch.optim.SGD(parameters, lr=1.0, foreach=False)
    scaler = LossScaler("cpu", enabled=True, ranks=Ranks(ranks))
    found = []
    for spoiled in (True, False):
        scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter) * scaler.get_scale()
        if spoiled and ranks.position == 1:
            parameters[1].grad.to_local()[0] = torch.inf
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        values = [p.detach() for p in parameters]
        found.append([(v.to_local() if isinstance(v, DTensor) else v).tolist() for v in values])
        found.append(scaler.get_scale())
    return found


def test_an_overflow_on_one_rank_skips_the_step_on_all(two_ranks):
    first = 2.0**16
    for skipped, scale, done, kept in two_ranks.run(overflow_on_one_rank):
        assert skipped == [[1.0] * 3, [1.0] * 2, [1.0] * 2] and scale == first / 2
        assert done == [[0.0] * 3, [0.0] * 2, [0.0] * 2] and kept == first / 2


def a_spoiled_step():
    results = []
    for before in (None, overflow_on_rank_1):
        ((model, scaler, result),) = training("float16", {}, {}, steps=1, before=before)
        weights = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
        results.append((result.is_finite, scaler.get_scale(), weights))
    return results


def test_a_step_of_the_trainer_with_an_overflow_on_one_rank(two_ranks):
    fresh = GPT(RECIPES["gpt-moe-test"]().updated(MODEL).model, dtype=torch.float32, seed=1)
    before = torch.cat([p.detach().flatten() for p in fresh.parameters()])
    for (good, scale, changed), (bad, halved, kept) in two_ranks.run(a_spoiled_step):
        assert (good, bad) == (True, False) and halved == scale / 2
        assert not torch.equal(changed, before) and torch.equal(kept, before)
