"""Rows of conversations are cut to what is in them, and may hold several: no loss and no gradient is another for it."""

import json

import numpy as np
import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.runs import losses_of, train_quietly

from expertmesh.data.packing import packed
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.task import Part
from expertmesh.moe.routing_noise import key_noise
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.evaluate import evaluate
from expertmesh.training.step import accumulate_gradients

SEQ_LEN = 192


@pytest.fixture
def chats(tmp_path):
    """Options of a run on conversations of 20 to 90 tokens; every seventh has two turns."""
    lines = []
    for i in range(48):
        turns = [("user", f"q{i} " * (1 + i % 3)), ("assistant", f"answer {i}" * (1 + i % 2))]
        turns = turns * 2 if i % 7 == 0 else turns
        lines.append(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return {
        "data.path": str(tmp_path / "chats.jsonl"),
        "data.seq_len": SEQ_LEN,
        "data.validation_fraction": 0.3,
        "model.max_seq_len": SEQ_LEN,
        "model.vocab_size": 300,
        "model.init_std": 0.2,
        "train.dtype": "float64",
        "train.micro_batch_size": 4,
        "train.steps": 2,
    }


class Whole(GPTTask):
    """Computes all padding."""

    def cut(self, batch):
        return batch


def gradients_of(task, batch):
    """Losses of a batch, and gradients by name."""
    model = task.builder.build(device="cpu", dtype=torch.float64).train()
    key_noise(model, seed=0, step=1)
    how = {"step": 1, "scaler": torch.amp.GradScaler("cpu", enabled=False)}
    how["precision"] = resolve_precision(task.config.train)
    size = task.config.train.micro_batch_size
    lengths = []
    hook = model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    losses, *_ = accumulate_gradients(task, model, batch, micro_batch_size=size, **how)
    hook.remove()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return losses, found, lengths


def check_equal(one, two, *, but=()):
    assert_close_fp64(one[0], two[0], what="losses")
    assert set(one[1]) == set(two[1])
    for name in set(one[1]) - set(but):
        assert_close_fp64(one[1][name], two[1][name], what=name)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"model.moe.router_noise": "gaussian"},
        {"model.moe.capacity_factor": 0.5},
        {"model.moe.routing_group_size": 8, "model.moe.capacity_factor": 1.0},
        {"model.moe.router": "expert_choice", "model.moe.routing_group_size": 24},
        {"model.moe.z_loss_weight": 0.1, "model.moe.num_shared_experts": 1},
        {"data.pack": True, "model.moe.router_noise": "gaussian"},
    ],
    ids=["plain", "noise", "capacity", "groups", "expert choice", "shared", "packed"],
)
def test_padding_that_no_row_needs_is_cut_and_changes_no_number(tiny, chats, options):
    config = tiny(**chats, **options)
    task, whole = GPTTask(config), Whole(config)
    data = task.prepare()
    batch = data.batch(0, 8)
    cut = gradients_of(task, batch)
    plain = gradients_of(whole, batch)
    check_equal(cut, plain)
    longest = [int(batch[2]["is_token"][i : i + 4].sum(1).max()) for i in (0, 4)]
    assert plain[2] == [SEQ_LEN] * 2
    parts = options.get("model.moe.routing_group_size", 1)
    assert all(n <= at < max(16, n * 1.25) + parts for n, at in zip(longest, cut[2], strict=True))
    model = task.builder.build(device="cpu", dtype=torch.float64)
    how = {"batch_size": 5, "max_samples": None, "precision": resolve_precision(config.train)}
    one, two = (evaluate(t, model, data, **how) for t in (task, whole))
    for name in one:
        assert_close_fp64(np.array(one[name]), np.array(two[name]), what=name)


def test_rows_are_whole_where_groups_reach_over_their_ends(tiny, chats):
    task = GPTTask(tiny(**chats, **{"model.moe.routing_group_size": 36}))
    batch = task.prepare().batch(0, 8)
    assert task.cut(batch)[0].shape == (8, SEQ_LEN)


def test_a_packed_row_is_its_conversations_alone(tiny, chats):
    """All of one epoch, with and without; routing losses are of other calls, and left out."""
    losses, sizes = [], []
    for pack in (False, True):
        options = {"data.pack": pack, "model.moe.aux_loss_weight": 0.0}
        task = GPTTask(tiny(**chats, **options))
        data = task.prepare()
        sizes.append(len(data._training))
        losses.append(gradients_of(task, data.batch(0, sizes[-1])))
        batch = data.batch(0, sizes[-1])
        assert task.num_items(batch) == int(batch[2]["counts"].sum())
        losses[-1] = (*losses[-1], task.num_items(batch))
    check_equal(*losses)
    assert losses[0][3] == losses[1][3], "the same tokens are learned"
    assert sizes[1] < sizes[0] / 2
    assert "packed rows" in data.description


def losses_of_run(values):
    config = GPTRunConfig.model_validate_json(values)
    train_quietly(config)
    return losses_of(config)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("degrees", [{"parallel.tp_degree": 2}, {}], ids=["tp", "dp"])
def test_ranks_cut_alike(tiny, chats, two_ranks, tmp_path, pack, degrees):
    config = tiny(**chats, **{"data.pack": pack, "train.batch_size": 8})
    one = losses_of_run(config.model_dump_json())
    changes = {**degrees, "train.run_dir": str(tmp_path / "two")}
    two = two_ranks.run(losses_of_run, config.updated(changes).model_dump_json())[0]
    assert_close_fp64(np.array(two), np.array(one), what="losses")


def test_a_run_keeps_to_its_rows(tiny, chats, run_quietly, tmp_path):
    config = tiny(**chats)
    run_quietly(config)
    with pytest.raises(ConfigError, match=r"data.pack=True: the run in .* has False"):
        run_quietly(config.updated({"data.pack": True, "train.steps": 4, "train.resume": "auto"}))
    with pytest.raises(ConfigError, match=r"data.pack=True: conflicts with model.batch_invariant"):
        config.updated({"data.pack": True, "model.batch_invariant": True})
    (tmp_path / "a.txt").write_text("words " * 999)
    with pytest.raises(ConfigError, match=r"data.pack=True: packs conversations"):
        GPTTask(config.updated({"data.path": str(tmp_path / "a.txt"), "data.pack": True})).prepare()


def test_a_task_of_its_own_computes_whole_batches(tiny, chats):
    """The seam's default."""
    from expertmesh.models.task import Task

    batch = (torch.zeros(2, 3),)
    assert Task.cut(GPTTask(tiny(**chats)), batch) is batch


@pytest.mark.parametrize("capacity", [7, 64])
def test_packing_is_a_partition_with_little_room(capacity):
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 300).tolist()
    rows = packed(lengths, capacity, range(300))
    assert sorted(i for row in rows for i in row) == list(range(300))
    filled = [sum(lengths[i] for i in row) for row in rows]
    assert max(filled) <= capacity
    assert sum(2 * one <= capacity for one in filled) <= 1
    assert packed([3, 3, 3], 3, [2, 0, 1]) == [[2], [0], [1]], "equally long ones in their order"
    assert packed([], capacity, []) == []


def test_tokens_that_are_cut_leave_the_others_their_index():
    part = Part(0, slice(3, 5), Ranks())
    whole = part.token_index(6, torch.device("cpu")).view(2, 6)
    cut = part.token_index(4, torch.device("cpu"), stride=6).view(2, 4)
    assert torch.equal(cut, whole[:, :4])
