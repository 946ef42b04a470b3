"""The same run on any layout: losses, gradient norms and evaluations of FP64 steps."""

import functools
import os
import signal
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from tests.support.ranks import world_of
from tests.support.runs import assert_same_lines, lines_of, train_quietly
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from expertmesh.cli.main import main
from expertmesh.config.run import RunConfig
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.own_module import own_family
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.matrices import on_whole_matrices, own_part
from expertmesh.runs.open import open_model
from expertmesh.training.muon import orthogonalized

STEPS = 4
COMPARED = ("loss", "aux_loss", "grad_norm", "eval_loss", "dropped_fraction", "load_imbalance")

# Noise and random dropping are on; a routing group is one sequence, which two ranks may share.
BASE = {
    "model.dim": 16,
    "model.max_seq_len": 16,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe.router_noise": "gumbel",
    "model.moe.capacity_factor": 1.0,
    "model.moe.min_capacity": 1,
    "model.moe.routing_group_size": 16,
    "data.seq_len": 16,
    "data.max_bytes": 60_000,
    "optim.warmup_steps": 2,
    "train.steps": STEPS,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_every": 2,
    "train.checkpoint_every": STEPS,
    "train.tensorboard": False,
}

# Without routing groups the balance loss is that of the whole batch.
DROPLESS = {
    "model.moe.capacity_factor": None,
    "model.moe.min_capacity": 4,
    "model.moe.routing_group_size": None,
    "model.moe.residual": True,
    "model.moe.num_experts": (4, 8),
    "train.micro_batch_size": 4,
}


def exhaustive(layout):
    """A layout that not every run of the tests tries."""
    return pytest.param(layout, marks=pytest.mark.exhaustive)


TWO = [
    exhaustive({}),
    exhaustive({"parallel.zero_stage": 2}),
    {"parallel.zero_stage": 1, "parallel.ep_degree": 1},
    exhaustive({"parallel.dp_replicate_degree": 2}),
    exhaustive({"parallel.es_degree": 2}),
]
FOUR = [
    exhaustive({}),
    exhaustive({"parallel.zero_stage": 1, "train.micro_batch_size": 4}),
    {"parallel.dp_replicate_degree": 2, "parallel.ep_degree": 1, "train.micro_batch_size": 4},
    exhaustive(  # as in test_checkpoint_ranks.py
        {
            "parallel.es_degree": 2,
            "parallel.route_degree": 2,
            "parallel.expert_order": "experts_inner",
        }
    ),
    exhaustive({"parallel.es_degree": 4}),
    exhaustive({"parallel.route_degree": 1}),
    {"parallel.ep_degree": 2, "parallel.zero_stage": 2},
]
TENSOR = {"parallel.tp_degree": 2}
TENSOR_TWO = [
    exhaustive(TENSOR),  # in test_tensor_parallel_command_line
    exhaustive(TENSOR | {"parallel.route_degree": 1, "train.micro_batch_size": 4}),
]
TENSOR_FOUR = [
    TENSOR | {"parallel.dp_shard_degree": 2},
    exhaustive(TENSOR | {"parallel.zero_stage": 1, "train.micro_batch_size": 4}),
    exhaustive(TENSOR | {"parallel.dp_replicate_degree": 2}),
    exhaustive(TENSOR | {"parallel.es_degree": 2, "parallel.route_degree": 2}),
]


MUON = {"optim.name": "muon", "train.batch_size": 8}


def config_of(folder, name, changes):
    return RECIPES["gpt-moe-test"]().updated(
        BASE | changes | {"train.run_dir": str(folder / name), "data.cache_dir": str(folder / "cache")}
    )


def run_training(folder, name, changes):
    """Train on the ranks there are; the lines of metrics.jsonl on the first of them."""
    train_quietly(config_of(folder, name, changes))
    leader = not dist.is_initialized() or dist.get_rank() == 0
    return lines_of(folder / name) if leader else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


GLOBAL = {"model.moe.balance_loss_scope": "global", "train.micro_batch_size": 4}
ONE_PROCESS = {"capacity": {}, "dropless": DROPLESS, "muon": MUON, "global": GLOBAL}


@pytest.fixture(scope="module")
def one_process(folder):
    """The lines of a run on one process by its name; each is trained when it is first asked for."""
    return functools.cache(lambda name: run_training(folder, f"one-{name}", ONE_PROCESS[name]))


def assert_same(lines, expected):
    assert_same_lines(lines, expected, *COMPARED)


@pytest.mark.parametrize("layout", TWO + TENSOR_TWO, ids=str)
def test_two_ranks(two_ranks, folder, one_process, layout):
    name = "-".join(("two", *layout))
    assert_same(two_ranks.run(run_training, folder, name, layout)[0], one_process("capacity"))


@pytest.mark.parametrize("layout", FOUR + TENSOR_FOUR, ids=str)
def test_four_ranks(four_ranks, folder, one_process, layout):
    name = "-".join(("four", *layout))
    assert_same(four_ranks.run(run_training, folder, name, layout)[0], one_process("capacity"))


@pytest.mark.parametrize(
    "layout",
    [
        exhaustive({}),
        {"parallel.route_degree": 2, "parallel.zero_stage": 1},
        exhaustive(TENSOR),
    ],
    ids=str,
)
def test_dropless_pyramid_in_micro_batches(four_ranks, folder, one_process, layout):
    name = f"dropless-{'-'.join(layout)}"
    lines = four_ranks.run(run_training, folder, name, DROPLESS | layout)[0]
    assert_same(lines, one_process("dropless"))


def test_balance_over_the_batch_in_micro_batches(two_ranks, folder, one_process):
    lines = two_ranks.run(run_training, folder, "two-global", GLOBAL)[0]
    assert_same(lines, one_process("global"))
    one = {**GLOBAL, "model.moe.balance_loss_scope": "group"}
    others = run_training(folder, "one-group", one)
    assert [line["aux_loss"] for line in others] != [line["aux_loss"] for line in lines]


class StoppedInAnEvaluation(GPTTask):
    """Asks the second rank to stop in the second batch of the evaluation after step 2."""

    calls = 0

    def measure(self, *given):
        self.calls += 1
        if self.calls == 4 + 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        StoppedInAnEvaluation.measured = self.calls
        return super().measure(*given)


def stopped_in_an_evaluation(folder):
    """Step, batches measured, checkpoint, rows."""
    config = config_of(folder, "asked", {"train.eval_batches": 4, "train.batch_size": 2})
    result = train_quietly(config, family=replace(GPT, task=StoppedInAnEvaluation))
    rows = len(lines_of(result.run_dir))
    return result.step, StoppedInAnEvaluation.measured, result.checkpoint.name, rows


def test_a_request_in_an_evaluation_leaves_it_out_on_all_ranks(two_ranks, folder):
    found = two_ranks.run(stopped_in_an_evaluation, folder)
    assert found == [(2, 6, "step_00000002", 2)] * 2


@pytest.mark.parametrize("part", ["experts", "router"])
def test_frozen_parts_learn_nothing(two_ranks, folder, part):
    changes = {"train.freeze": (part,), "train.steps": 2, "train.checkpoint_every": 2}
    one = run_training(folder, f"one-frozen-{part}", changes)
    assert_same(two_ranks.run(run_training, folder, f"two-frozen-{part}", changes)[0], one)
    trained = open_model(folder / f"two-frozen-{part}")
    before = trained.task.builder.build(device="cpu", dtype=torch.float64).state_dict()
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (f".moe.{part}." in name), name


@pytest.mark.parametrize(
    "layout",
    [
        {},  # experts whole on a rank; dense matrices gathered
        exhaustive({"parallel.es_degree": 2, "parallel.offload": True}),
        TENSOR | {"parallel.es_degree": 2},  # slices of experts gathered, too
    ],
    ids=str,
)
def test_muon(four_ranks, folder, one_process, layout):
    lines = four_ranks.run(run_training, folder, f"muon-{'-'.join(layout)}", MUON | layout)[0]
    assert_same(lines, one_process("muon"))


class Noisy(nn.Module):
    """Noise and random drops, in a model that says no token's place in the batch; a routing group is one sample."""

    def __init__(self):
        super().__init__()
        random = {"router_noise": "gumbel", "capacity_factor": 0.5, "min_capacity": 1}
        sizes = {"dim": 3, "hidden_dim": 4, "num_experts": 4, "top_k": 2}
        self.moe = MoELayer(**sizes, **random, routing_group_size=5, aux_loss_weight=0.0)

    def forward(self, x):
        return self.moe(x)


def train_module(folder, name, micro_batch_size):
    train = {"steps": 2, "batch_size": 8, "micro_batch_size": micro_batch_size, "dtype": "float64"}
    places = {"device": "cpu", "tensorboard": False, "run_dir": str(folder / name)}
    config = RunConfig(train=train | places, optim={"warmup_steps": 1})

    def loss(model, x):
        y, stats = model(x)
        return (y - x).square().mean(), stats

    data = torch.randn(32, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    train_quietly(config, family=own_family(Noisy, data=(data,), loss=loss))


def test_noise_in_a_module_that_knows_no_places(two_ranks, folder):
    """Neither micro-batches nor ranks draw the numbers of others."""
    train_module(folder, "noisy-one", None)
    two_ranks.run(train_module, folder, "noisy-two", 4)
    oracle = lines_of(folder / "noisy-one")
    names = "loss", "grad_norm", "dropped_fraction"
    assert_same_lines(lines_of(folder / "noisy-two"), oracle, *names)


def on_strided_parts():
    """A matrix whose rows tensor parallelism has cut, and FSDP2 again: where no other axis can be cut evenly."""
    mesh = world_of(False).mesh((2, 2), ("dp", "tp"), [0, 1, 2, 3])
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    cut = [_StridedShard(0, split_factor=2), Shard(0)]
    parameter = distribute_tensor(matrix, mesh, cut)
    found = on_whole_matrices(orthogonalized, own_part(parameter), parameter=parameter)
    return found, own_part(distribute_tensor(orthogonalized(matrix), mesh, cut))


def test_matrices_that_are_cut_twice_are_whole_for_muon(four_ranks):
    for found, expected in four_ranks.run(on_strided_parts):
        assert torch.equal(found, expected)


def words_of(changes):
    """A configuration as words of the command line."""
    words = []
    for name, value in changes.items():
        flag = "--" + name.replace("_", "-")
        head, _, leaf = flag.rpartition(".")
        on_off = [f"{head}.no-{leaf}"] if value is False else [flag]
        words += on_off if isinstance(value, bool) else [flag, str(value)]
    return words


def cli_words(folder, name, layout):
    places = {"train.run_dir": folder / name, "data.cache_dir": folder / "cache"}
    return words_of(BASE | layout | places)


def command_line(words):
    """One rank of torchrun."""
    return main(["train", "gpt-moe-test", *words])


def test_tensor_parallel_command_line(tmp_path, folder, one_process):
    """The flags of `torchrun ... expertmesh train`: the losses of one process, and one set of lines, from rank 0."""
    agent = Agent(2, tmp_path)
    agent.start(command_line, cli_words(folder, "cli", TENSOR))
    codes = agent.wait(timeout_s=PATIENCE_S)
    agent.stop()
    said = [agent.printed(rank) for rank in range(2)]
    assert codes == [0, 0], said
    assert [text.count(f"step {STEPS}/{STEPS}") for text in said] == [1, 0]
    assert_same(lines_of(folder / "cli"), one_process("capacity"))
