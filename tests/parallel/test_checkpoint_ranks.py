"""Checkpoints of several ranks: each writes and reads its own part, on any layout, and nobody has the whole."""

import errno
import logging
import shutil
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.support.memory import peak_bytes
from tests.support.runs import assert_same_lines, lines_of, train_quietly
from torch import nn

from expertmesh.checkpoints import store as checkpoint
from expertmesh.checkpoints.dcp import Checkpoint
from expertmesh.checkpoints.manifest import find_damage
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints, newest_good
from expertmesh.comm.world import World
from expertmesh.config.run import RunConfig
from expertmesh.errors import CheckpointError, PeerError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.parallelize import parallelize_gpt
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.own_module import own_family
from expertmesh.moe.layer import MoELayer
from expertmesh.parallel.matrices import own_part
from expertmesh.parallel.ranks import Ranks
from expertmesh.training.optim import build_optimizer
from expertmesh.training.state import RunProgress, TrainState

STEPS, SAVED = 6, 2

# Noise and random dropping are on; a routing group is half a sequence, so that one of two ranks has it whole.
BASE = {
    "model.dim": 16,
    "model.max_seq_len": 16,
    "model.ffn_hidden_dim": 32,
    "model.moe.num_experts": (8,),
    "model.moe.hidden_dim": 16,
    "model.moe.router_noise": "gumbel",
    "model.moe.capacity_factor": 1.0,
    "model.moe.min_capacity": 1,
    "model.moe.routing_group_size": 8,
    "data.seq_len": 16,
    "data.max_bytes": 60_000,
    "optim.schedule_steps": STEPS,
    "train.batch_size": 8,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_every": SAVED,
    "train.eval_batches": 1,
    "train.checkpoint_every": SAVED,
    "train.tensorboard": False,
    "train.resume": "auto",
}


def config_of(folder, name, changes):
    places = {"train.run_dir": str(folder / name), "data.cache_dir": str(folder / "cache")}
    return RECIPES["gpt-moe-test"]().updated(BASE | changes | places)


def run_training(folder, name, steps, changes):
    """Train on the ranks there are; the error of this rank, or None."""
    config = config_of(folder, name, {"train.steps": steps} | changes)
    try:
        train_quietly(config)
    except (CheckpointError, PeerError, OSError) as error:
        return type(error).__name__, str(error)
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(folder):
    """All steps in one process."""
    assert run_training(folder, "straight", STEPS, {}) is None
    return lines_of(folder / "straight")


@pytest.fixture(scope="module")
def saved(folder, four_ranks):
    """The first steps on four ranks."""
    assert four_ranks.run(run_training, folder, "four", SAVED, {"parallel.ep_degree": 4}) == [None] * 4
    return folder / "four"


def copy_of(run_dir, name):
    shutil.copytree(run_dir, run_dir.with_name(name))
    return name


def assert_same(folder, name, oracle, steps):
    names = "loss", "grad_norm", "eval_loss", "dropped_fraction"
    assert_same_lines(lines_of(folder / name), oracle[:steps], *names)


def test_four_ranks_to_one(folder, straight, saved):
    name = copy_of(saved, "to-one")
    assert run_training(folder, name, 2 * SAVED, {}) is None
    assert_same(folder, name, straight, 2 * SAVED)


def test_four_ranks_to_two_that_share_sequences_and_to_four_with_offload(
    folder, straight, saved, two_ranks, four_ranks
):
    name = copy_of(saved, "to-two")
    layout = {"parallel.tp_degree": 2, "parallel.es_degree": 2}
    assert two_ranks.run(run_training, folder, name, 2 * SAVED, layout) == [None] * 2
    assert_same(folder, name, straight, 2 * SAVED)
    layout = {"parallel.dp_replicate_degree": 2, "parallel.zero_stage": 2}
    layout |= {"parallel.offload": True}
    assert four_ranks.run(run_training, folder, name, STEPS, layout) == [None] * 4
    assert_same(folder, name, straight, STEPS)


def test_four_ranks_to_eight_and_back(folder, straight, saved, eight_ranks, four_ranks):
    name = copy_of(saved, "to-eight")
    layout = {"parallel.es_degree": 2, "parallel.ep_degree": 4}
    layout |= {"parallel.expert_order": "experts_inner"}
    assert eight_ranks.run(run_training, folder, name, 2 * SAVED, layout) == [None] * 8
    assert_same(folder, name, straight, 2 * SAVED)
    assert four_ranks.run(run_training, folder, name, STEPS, {"parallel.ep_degree": 4}) == [None] * 4
    assert_same(folder, name, straight, STEPS)


class WithModules(nn.Module):
    """A layer whose experts are modules; on ranks each has some of them."""

    def __init__(self):
        super().__init__()
        options = {"dim": 3, "hidden_dim": 3, "num_experts": 4, "top_k": 2}
        self.moe = MoELayer(**options, experts=lambda _: nn.Linear(3, 3))

    def forward(self, x):
        return self.moe(x)


def train_modules(folder, name, steps):
    train = {name: BASE[f"train.{name}"] for name in ("dtype", "device", "tensorboard", "resume")}
    train |= {"steps": steps, "run_dir": str(folder / name), "batch_size": 8}
    config = RunConfig(train=train, optim={"schedule_steps": 2 * SAVED, "warmup_steps": 1})

    def loss(model, x):
        y, stats = model(x)
        return (y - x).square().mean(), stats

    data = torch.randn(32, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    train_quietly(config, family=own_family(WithModules, data=(data,), loss=loss))


def test_experts_that_are_modules_move_between_ranks(folder, two_ranks, four_ranks):
    """The checkpoint has those of all ranks, and the model of a rank its own."""
    train_modules(folder, "modules-straight", 2 * SAVED)
    two_ranks.run(train_modules, folder, "modules", SAVED)
    four_ranks.run(train_modules, folder, "modules", 2 * SAVED)
    oracle = lines_of(folder / "modules-straight")
    assert_same_lines(lines_of(folder / "modules"), oracle, "loss", "grad_norm")


def test_each_rank_has_written_its_own_file(saved):
    path = list_checkpoints(saved / "checkpoints")[-1]
    names = {f"__{rank}_0.distcp" for rank in range(4)}
    assert {p.name for p in path.iterdir()} == names | {".metadata", "manifest.json", "state.json"}
    shape = Checkpoint(path).tensors["model.embedding.weight"].shape
    found = {"model.embedding.weight": torch.zeros(shape, dtype=torch.float64)}
    reader = dist.checkpoint.FileSystemReader(path)
    with pytest.warns(UserWarning, match="single process"):
        dist.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert found["model.embedding.weight"].abs().sum() > 0


def state_on_ranks(layout):
    """A model of some MiB with optimizer state, spread over all ranks."""
    config = RECIPES["gpt-moe-test"]().updated(
        {"model.dim": 128, "model.num_heads": 4, "model.moe.hidden_dim": 256}
        | {f"parallel.{name}": value for name, value in layout.items()}
    )
    world = World()
    ranks = Ranks(world, tp_degree=config.parallel.tp_degree)
    model = GPT(config.model, seed=1)
    whole = sum(t.nbytes for t in model.state_dict().values())
    parallelize_gpt(model, config.parallel, world=world)
    optimizer = build_optimizer(model, config.optim)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TrainState(model, optimizer, torch.amp.GradScaler("cpu"), RunProgress(), ranks)
    return state, 3 * whole  # weights and two moments


def bytes_of_ranks(folder, layout):
    """Bytes that a rank stages, and its peaks while it stages and while it reads, beside all bytes there are."""
    state, everything = state_on_ranks(layout)
    store = CheckpointStore(folder, keep_last=1, ranks=state.ranks)
    tensors = state.tensors()
    staging = peak_bytes(lambda: store.stager.stage(tensors))
    staged = store.stager.stage(tensors)
    store.save(1, tensors, {}, eval_loss=None)
    store.wait()
    store.close()
    before = {name: own_part(t).detach().clone() for name, t in tensors.items()}
    with torch.no_grad():
        for tensor in tensors.values():
            own_part(tensor).zero_()
    reading = peak_bytes(lambda: read_into(Checkpoint(store.paths()[0]), tensors))
    same = all(torch.equal(own_part(t), before[name]) for name, t in tensors.items())
    largest = max(t.nbytes for t in staged.pieces.values())
    exact = sum(t.numel() * t.element_size() for t in tensors.values())
    state.ranks.world.close()
    return staged.num_bytes, staging, reading, largest, exact, everything, same


@pytest.mark.parametrize("layout", [{}, {"dp_replicate_degree": 2}, {"tp_degree": 2, "es_degree": 2}], ids=str)
def test_no_rank_has_the_whole(four_ranks, tmp_path, layout):
    found = four_ranks.run(bytes_of_ranks, tmp_path, layout)
    *_, exact, everything, _ = found[0]
    assert exact > everything  # steps and random numbers are small, but there
    # Every piece is written once, and all ranks write about as much.
    assert sum(staged for staged, *_ in found) == exact
    for staged, staging, reading, largest, _, _, same in found:
        assert same
        assert staged < 1.1 * exact / 4
        assert staging < 1.1 * exact / 4
        # One piece after the other is read, whole and as a part.
        assert reading < 3 * largest < exact / 4


def spoiled_write(folder, odd):
    """One good save; one in which rank `odd` finds the disk full; the errors of this rank."""
    world = World()
    store = CheckpointStore(folder, keep_last=3, ranks=Ranks(world))
    tensors = {"a": torch.arange(4.0), "b": torch.ones(3)}
    store.save(1, tensors, {}, eval_loss=None)
    store.wait()
    write = checkpoint.write_tensors

    def full(partial, staged):
        if world.position == odd:
            raise OSError(errno.ENOSPC, "No space left on device", str(partial))
        if odd == 0:
            time.sleep(0.3)  # rank 0 has cleaned up before this file comes
            partial.mkdir(exist_ok=True)
        return write(partial, staged)

    checkpoint.write_tensors = full
    try:
        store.save(2, tensors, {}, eval_loss=None)
        store.wait()
        found = None
    except (OSError, PeerError) as error:
        found = type(error).__name__, str(error)
    finally:
        checkpoint.write_tensors = write
    dist.barrier()
    left = sorted(path.name for path in folder.iterdir())
    dist.barrier()
    store.save(3, tensors, {}, eval_loss=None)
    store.wait()
    store.close()
    return found, left, find_damage(folder / "step_00000003")


@pytest.mark.parametrize("odd", [0, 1])
def test_a_full_disk_of_one_rank_is_told_to_all(two_ranks, tmp_path, odd):
    (mine, left, damage), (other, *_) = two_ranks.run(spoiled_write, tmp_path, odd)
    assert mine[0] == "OSError" and "No space left on device" in mine[1]
    assert ("rank 1: " in mine[1]) == (odd == 1)
    assert other[0] == "PeerError" and f"rank {odd}" in other[1]
    assert left == ["step_00000001"] and damage is None


def delayed_write(folder):
    """Rank 1 writes only after training has changed the tensors; what `check` and the folder say until then."""
    world = World()
    store = CheckpointStore(folder, keep_last=3, ranks=Ranks(world))
    write, gate = checkpoint.write_tensors, threading.Event()

    def slow(partial, staged):
        assert world.position == 0 or gate.wait(30)
        return write(partial, staged)

    checkpoint.write_tensors = slow
    tensors = {"a": torch.ones(3)}
    store.save(1, tensors, {}, eval_loss=None)
    checkpoint.write_tensors = write
    tensors["a"].fill_(9.0)
    store.check()
    visible = [path.name for path in store.paths()]
    dist.barrier()
    gate.set()
    store.wait()
    store.close()
    found = {"a": torch.zeros(3)}
    read_into(Checkpoint(store.paths()[0]), found)
    return visible, found["a"].tolist()


def test_training_goes_on_while_ranks_write(two_ranks, tmp_path):
    assert two_ranks.run(delayed_write, tmp_path) == [([], [1.0] * 3)] * 2


def remove(file):
    file.unlink()


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def choice_of_newest(folder):
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("expertmesh.checkpoint")
    logger.addHandler(handler)
    world = World()
    try:
        return newest_good(folder, Ranks(world)).name, messages
    finally:
        logger.removeHandler(handler)
        world.close()


@pytest.mark.parametrize(("damage", "words"), [(remove, "is missing"), (flip, "has another checksum")])
def test_a_damaged_file_of_one_rank(folder, saved, four_ranks, damage, words):
    name = copy_of(saved, f"damaged-{damage.__name__}")
    checkpoints = folder / name / "checkpoints"
    shutil.copytree(checkpoints / "step_00000002", checkpoints / "step_00000003")
    damage(checkpoints / "step_00000003" / "__2_0.distcp")
    (chosen, messages), *others = four_ranks.run(choice_of_newest, checkpoints)
    assert [chosen, *(c for c, _ in others)] == ["step_00000002"] * 4
    assert len(messages) == 1 and f"__2_0.distcp {words}" in messages[0]
    assert all(not said for _, said in others)
    damage(checkpoints / "step_00000002" / "__1_0.distcp")
    (kind, text), *rest = four_ranks.run(run_training, folder, name, 2 * SAVED, {})
    assert kind == "CheckpointError" and "all 2 checkpoints are damaged" in text
    assert "\n" not in text and set(rest) == {("PeerError", text)}


def other_model(folder):
    state, _ = state_on_ranks({})
    try:
        state.ranks.on_all(lambda: state.load(folder))
    except (CheckpointError, PeerError) as error:
        return type(error).__name__, str(error)
    finally:
        state.ranks.world.close()
    return None


def test_a_checkpoint_of_another_model(saved, two_ranks):
    first, second = two_ranks.run(other_model, list_checkpoints(saved / "checkpoints")[-1])
    assert first[0] == "CheckpointError" and "it is of another model" in first[1]
    assert second == ("PeerError", f"{first[1]} (rank 0)")
