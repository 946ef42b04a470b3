"""Adapters of a run on any layout: losses, norms and evaluations of one process, and checkpoints for any number of
ranks."""

import functools

import pytest
import torch
import torch.distributed as dist
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.checkpoints.source import read_whole
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.runs.run_dir import load_run

STEPS = 3
BASE = {
    "model.dim": 16,
    "model.max_seq_len": 16,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe.num_shared_experts": 1,
    "model.moe_every": 2,
    "data.seq_len": 16,
    "data.max_bytes": 60_000,
    "optim.warmup_steps": 0,
    "train.batch_size": 8,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_batches": 2,
    "train.tensorboard": False,
}
LORA = {"adapter.kind": "lora", "adapter.rank": 3, "optim.lr": 3e-2, "train.steps": STEPS}
KINDS = {"own": {}, "shared": {"adapter.shared": True}}


def config_of(folder, name, changes):
    places = {"train.run_dir": str(folder / name), "data.cache_dir": str(folder / "cache")}
    return RECIPES["gpt-moe-test"]().updated(BASE | places | changes)


def run_training(folder, name, changes):
    """Train on the ranks there are; the lines of metrics.jsonl on the first of them."""
    base = {"train.init_from": str(folder / "base"), "train.checkpoint_every": STEPS}
    train_quietly(config_of(folder, name, LORA | base | changes))
    leader = not dist.is_initialized() or dist.get_rank() == 0
    return lines_of(folder / name) if leader else None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("adapters")
    train_quietly(config_of(place, "base", {"train.steps": 1}))
    return place


@pytest.fixture(scope="module")
def one_process(folder):
    return functools.cache(lambda kind: run_training(folder, f"one-{kind}", KINDS[kind]))


TWO = [
    {},  # experts on both ranks, dense weights sharded
    {"parallel.es_degree": 2},
    {"parallel.route_degree": 1},
    {"parallel.tp_degree": 2},
    {"parallel.zero_stage": 1, "train.micro_batch_size": 4},
    {"parallel.dp_replicate_degree": 2},
]


@pytest.mark.parametrize("layout", TWO, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_as_one_process(two_ranks, folder, one_process, layout, kind):
    name = "-".join(("two", kind, *layout))
    lines = two_ranks.run(run_training, folder, name, KINDS[kind] | layout)[0]
    assert_same_lines(lines, one_process(kind), "loss", "aux_loss", "grad_norm", "eval_loss")
    assert len({line["loss"] for line in lines}) == STEPS


@pytest.mark.parametrize("layout", [{}, {"parallel.tp_degree": 2}], ids=str)
def test_the_row_of_an_added_token_learns_over_ranks(two_ranks, folder, layout):
    """One row, of which a rank may have none."""
    more = {"tokens.add": ("import os",)}
    expected = run_training(folder, f"one-tokens{len(layout)}", more)
    name = f"two-tokens{len(layout)}"
    lines = two_ranks.run(run_training, folder, name, more | layout)[0]
    assert_same_lines(lines, expected, "loss", "grad_norm", "eval_loss")
    (ours, theirs) = (load_run(folder / one).open_weights() for one in (name, f"one-tokens{len(layout)}"))
    rows = [read_whole(source, "embedding.weight") for source in (ours, theirs)]
    torch.testing.assert_close(*rows)
    before = read_whole(load_run(folder / "base").open_weights(), "embedding.weight")
    assert len(rows[0]) == len(before) + 1 and torch.equal(rows[0][:-1], before)
    assert not torch.allclose(rows[0][-1], before.mean(0))


def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(two_ranks, folder, one_process):
    one_process("own")
    two_ranks.run(run_training, folder, "goes-on", {})
    longer = {"train.steps": STEPS + 2, "train.resume": "required", "optim.schedule_steps": STEPS}
    found, expected = (run_training(folder, name, longer) for name in ("goes-on", "one-own"))
    assert_same_lines(found, expected, "loss", "grad_norm")
    ours, theirs = (load_run(folder / name).open_weights() for name in ("goes-on", "one-own"))
    for name in ours.tensors:
        torch.testing.assert_close(read_whole(ours, name), read_whole(theirs, name))
