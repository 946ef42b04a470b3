"""What a rank holds, between steps and at most, is what `expertmesh.costs.memory.peak_memory` says, in each form."""

import pytest
import torch
from tests.support.rank_memory import memory_of_rank
from torch.distributed.fsdp import FSDPModule

from expertmesh.comm.world import World
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.apply import follow_optimizer
from expertmesh.parallel.matrices import own_part
from expertmesh.training.optim import build_optimizer

TWO_PERCENT = 0.02
ALSO = ("E+D by ep_degree", "D", "E+Z2", "E+M", "E+Z-Offload")
"""Forms of which others have every part: where everything runs."""
MODEL = {
    "model.num_layers": 4,
    "model.moe_every": 2,
    "model.moe.num_shared_experts": 1,
    "model.moe.residual": True,
    "model.moe.bias": True,
}
FORMS = {
    "E": {},
    "E+D by ep_degree": {"parallel.ep_degree": 2},
    "E+D by layer": {"parallel.ep_degree": (1, 2), "parallel.zero_stage": 2},
    "E+D by copies": {"parallel.dp_replicate_degree": 2},
    "D": {"parallel.dp_replicate_degree": 4},
    "E sliced": {"parallel.es_degree": 2},
    "E+Z1": {"parallel.zero_stage": 1, "parallel.route_degree": 1},
    "E+Z2": {"parallel.zero_stage": 2, "parallel.route_degree": 2},
    "E+Z3": {"parallel.zero_stage": 3, "parallel.route_degree": 1},
    "E+D+Z": {"parallel.dp_replicate_degree": 2, "parallel.zero_stage": 1, "parallel.ep_degree": 1},
    "E+M": {"parallel.tp_degree": 2},
    "E+D+M": {"parallel.tp_degree": 2, "parallel.dp_replicate_degree": 2},
    "E+Z+M": {"parallel.tp_degree": 2, "parallel.zero_stage": 1, "parallel.route_degree": 2},
    "E+Z-Offload": {"parallel.offload": True, "parallel.route_degree": 1},
    "E+Z-Offload+M": {"parallel.offload": True, "parallel.tp_degree": 2, "parallel.zero_stage": 2},
}
ALL_IN_PARTS = ("E", "E+Z1", "E+Z2", "E+Z3", "E+D by copies")


def num_bytes(tensors):
    return sum(own_part(t).nbytes for t in tensors)


def under_way(block):
    """Bytes of a block that FSDP2 gathers ahead of its use."""
    result = block._get_fsdp_state()._fsdp_param_group._all_gather_result
    return 0 if result is None else result.all_gather_output.nbytes


def place(parameter):
    return own_part(parameter).untyped_storage().data_ptr()


class Watch:
    """The most bytes of whole dense parameters while a model runs, forward and backward."""

    def __init__(self, model):
        self.model, self.most = model, 0
        self.at_rest = {place(p) for p in model.parameters()}
        for module in model.layers:
            module.register_forward_pre_hook(lambda *_: self.look())
            module.register_forward_hook(self.after)

    def look(self):
        now = num_bytes(p for p in self.model.parameters() if place(p) not in self.at_rest)
        self.most = max(self.most, now + sum(map(under_way, self.model.layers)))

    def after(self, module, args, output):
        self.look()
        for tensor in (args[0], output[0]):
            tensor.register_hook(lambda _: self.look())


def memory_of_a_step(changes):
    """This rank's parameters, gradients, moments, and the most that it gathered of dense and of expert weights."""
    config = RECIPES["gpt-moe-test"]().updated(MODEL | changes)
    model = GPT(config.model, seed=0)
    world = World()
    parallelize_gpt(model, config.parallel, world=world)
    optimizer = build_optimizer(model, config.optim)
    follow_optimizer(model, optimizer)
    assert isinstance(model, FSDPModule)
    watch = Watch(model)
    parameters = num_bytes(model.parameters())
    with world.traffic.logged() as log:
        logits = model(torch.zeros(1, 16, dtype=torch.int64)).logits_BSV
    logits.square().sum().backward()
    gradients = num_bytes(p.grad for p in model.parameters())
    optimizer.step()
    state = num_bytes(s[k] for s in optimizer.state.values() for k in ("exp_avg", "exp_avg_sq"))
    world.close()
    tables, tp = log.num_bytes(where="stored parameters"), config.parallel.tp_degree
    dense = watch.most + (tables * tp // (tp - 1) if tp > 1 else 0)
    return (parameters, gradients, state), dense, gathered_experts(log, config, world.size)


def gathered_experts(log, config, num_ranks):
    """From what others sent: the gather brings n - 1 of n shards."""
    W, found = num_ranks // config.parallel.dp_replicate_degree, []
    for index, name in enumerate(("layer 1, weights", "layer 3, weights")):
        ep_degree = config.parallel.ep_degree_of(index, num_moe_layers=2)
        n = W // (ep_degree or config.parallel.route_degree or W)
        sent = log.num_bytes(collective="all_gather", where=name)
        found.append(sent * n // (n - 1) if n > 1 else sent)
    return sum(found)  # with two layers, all: the second is gathered beside the first


@pytest.mark.parametrize("form", [pytest.param(f, marks=[pytest.mark.exhaustive] * (f in ALSO)) for f in FORMS])
def test_every_rank_holds_what_the_formula_says(four_ranks, form):
    config = RECIPES["gpt-moe-test"]().updated(MODEL | FORMS[form])
    expected = memory_of_rank(config.model, config.parallel, 4)
    at_rest = expected.weights_bytes, expected.gradients_bytes, expected.optimizer_bytes
    if form in ALL_IN_PARTS:  # parameters, gradients and two moments, whatever the stage
        whole = sum(p.nbytes for p in GPT(config.model, seed=0).parameters())
        copies = config.parallel.dp_replicate_degree
        assert sum(at_rest) == pytest.approx(4 * whole * copies / 4, rel=TWO_PERCENT)
    for held, dense, experts in four_ranks.run(memory_of_a_step, FORMS[form]):
        assert held == pytest.approx(at_rest, rel=TWO_PERCENT)
        assert dense == pytest.approx(expected.gathered_dense_bytes, rel=TWO_PERCENT)
        assert experts == expected.gathered_experts_bytes
