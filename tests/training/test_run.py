"""Whole runs: resume, locks, what is refused, what is written."""

import errno
import fcntl
import json
import math
import os
import shutil
import signal
import sys
from multiprocessing import Pipe

import pytest
import torch
from tests.support.calls import calls_of
from tests.support.nursery import the_nursery
from tests.support.patience import PATIENCE_S
from tests.support.runs import lines_of, losses_of
from tests.training.conftest import spoil_gradients

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.data.text import TextData
from expertmesh.errors import CheckpointError, ConfigError, TrainingDivergedError
from expertmesh.models.gpt.model import GPT
from expertmesh.runs.run_dir import RunDir, load_run
from expertmesh.training import stop, trackers
from expertmesh.training.metrics import MetricsFile, measure_load, read_metrics


def lines(config):
    return read_metrics(RunDir(config.train.run_dir).metrics)


def weights(config):
    run = load_run(config.train.run_dir)
    model = GPT(run.config.model, dtype=torch.float64 if run.config.train.dtype == "float64" else None)
    run.load_into(model.state_dict())
    return model.state_dict()


@pytest.fixture(scope="module")
def finished(tiny_in, tmp_path_factory, run_quietly):
    """A run of 8 steps and one of 2, by their numbers of steps; for tests that do not change them."""
    runs = {steps: tiny_in(tmp_path_factory.mktemp("run"), **{"train.steps": steps}) for steps in (2, 8)}
    for config in runs.values():
        run_quietly(config)
    return runs


def test_a_run_writes_what_it_promises(tiny, run_quietly):
    config = tiny()
    result = run_quietly(config)
    assert (result.step, result.items, result.stopped_by) == (8, 8 * 4 * 16, None)
    metrics = lines(config)
    assert [m["step"] for m in metrics] == list(range(1, 9))
    keys = "step loss aux_loss z_loss grad_norm lr tokens_per_second load_imbalance"
    keys += " dropped_fraction dead_experts skipped_steps"
    assert all(set(keys.split()) <= set(m) for m in metrics)
    assert [m["step"] for m in metrics if "eval_loss" in m] == [4, 8]
    assert "initial_eval_loss" in metrics[0] and "eval_bits_per_byte" in metrics[-1]
    assert result.evaluation["bits_per_byte"] == metrics[-1]["eval_bits_per_byte"]
    assert result.initial_evaluation["bits_per_byte"] > result.evaluation["bits_per_byte"]
    names = {p.name for p in RunDir(config.train.run_dir).path.iterdir()}
    assert {"config.json", "versions.json", "metrics.jsonl", "tokenizer.json", "lock"} <= names
    assert "arithmetic.json" in names
    run = load_run(config.train.run_dir)
    assert run.config == config and run.checkpoint == result.checkpoint
    versions = json.loads(RunDir(config.train.run_dir).versions.read_text())
    assert versions["torch"] == torch.__version__.partition("+")[0] or versions["torch"]


STOCHASTIC = {
    "model.moe.router_noise": "gumbel",
    "model.moe.capacity_factor": 1.0,
    "model.moe.bias_update_rate": 0.01,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_ten_steps_are_five_and_five(tiny, run_quietly, tmp_path, dtype):
    common = {"train.dtype": dtype, "optim.schedule_steps": 10, "train.checkpoint_every": 100}
    common |= STOCHASTIC | {"train.eval_every": 5}
    straight = tiny(**common, **{"train.steps": 10, "train.run_dir": str(tmp_path / "straight")})
    half = tiny(**common, **{"train.steps": 5, "train.run_dir": str(tmp_path / "halves")})
    rest = half.updated({"train.steps": 10, "train.resume": "required"})
    run_quietly(straight)
    run_quietly(half)
    torch.manual_seed(99)
    assert run_quietly(rest).resumed_from == 5
    assert lines_of(straight.train.run_dir) == lines_of(rest.train.run_dir)
    for (name, a), b in zip(weights(straight).items(), weights(rest).values(), strict=True):
        assert torch.equal(a, b), name


def test_another_batch_size_goes_on_where_the_data_stopped(tiny, run_quietly):
    config = tiny(**{"train.steps": 3})
    run_quietly(config)
    with calls_of(TextData.batch) as calls:
        changes = {"train.steps": 5, "train.batch_size": 6, "train.resume": "auto"}
        run_quietly(config.updated(changes))
    assert [tuple(variables[n] for n in ("first_sample", "num_samples")) for variables, _ in calls] == [
        (12, 6),
        (18, 6),
    ]


def test_a_run_goes_on_without_the_one_that_it_began_with(tiny, run_quietly, tmp_path):
    run_quietly(tiny(**{"train.run_dir": str(tmp_path / "first"), "model.dim": 16}))
    common = {"train.init_from": str(tmp_path / "first"), "train.checkpoint_every": 2}
    straight = tiny(**common, **{"train.run_dir": str(tmp_path / "straight")})
    half = tiny(**common, **{"train.steps": 4, "optim.schedule_steps": 8})
    run_quietly(straight)
    run_quietly(half)
    shutil.move(tmp_path / "first", tmp_path / "away")
    rest = {"train.steps": 6, "train.resume": "auto"}
    run_quietly(half.updated(rest))
    saved = load_run(half.train.run_dir).config
    assert saved.train.init_from == str(tmp_path / "first")
    run_quietly(saved.updated({"train.steps": 8}))
    assert losses_of(half) == losses_of(straight) and len(losses_of(half)) == 8
    with pytest.raises(ConfigError, match="first: does not exist"):
        run_quietly(tiny(**common, **{"train.run_dir": str(tmp_path / "other")}))


def test_a_finished_run_has_nothing_left_to_do(tiny, run_quietly):
    config = tiny(**{"train.resume": "auto"})
    first = run_quietly(config)
    before = lines_of(config.train.run_dir)
    again = run_quietly(config)
    assert (again.step, again.resumed_from) == (8, 8)
    assert again.evaluation == first.evaluation
    assert lines_of(config.train.run_dir) == before


def test_metrics_after_the_checkpoint_are_cut_off(tiny, run_quietly, caplog):
    config = tiny(**{"train.resume": "auto"})
    run_quietly(config)
    straight = lines_of(config.train.run_dir)
    newest = list_checkpoints(RunDir(config.train.run_dir).checkpoints)[-1]
    damaged = next(newest.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with RunDir(config.train.run_dir).metrics.open("a") as file:
        file.write('{"step": 9, "loss": 1.0}\n{"step": 10, "lo')
    assert run_quietly(config).resumed_from == 4
    assert f"{newest} is damaged" in caplog.text
    assert lines_of(config.train.run_dir) == straight


def snapshot(folder):
    return {p: p.is_file() and p.read_bytes() for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize(
    "changes",
    [
        {"train.resume": "required"},
        {"data.path": "nowhere"},
        {"model.vocab_size": 257, "data.encode_with": "nowhere.json"},
        {"distill.teacher": "nowhere"},
        {"distill.teacher": "the finished run", "model.vocab_size": 290},
    ],
    ids=str,
)
@pytest.mark.parametrize("place", ["new", "made/by/the user", "new/and/deep"])
def test_a_run_that_is_refused_leaves_nothing(tiny, finished, run_quietly, tmp_path, changes, place):
    if changes.get("distill.teacher") == "the finished run":
        changes = {**changes, "distill.teacher": finished[2].train.run_dir}
    (tmp_path / "made" / "by" / "the user").mkdir(parents=True)
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError):
        run_quietly(tiny(**{"train.run_dir": str(tmp_path / place), **changes}))
    assert snapshot(tmp_path) == before


def test_a_refusal_leaves_no_lock_in_a_run_of_others(finished, run_quietly, tmp_path):
    """One that was copied or converted has none."""
    shutil.copytree(finished[2].train.run_dir, tmp_path / "copy")
    (tmp_path / "copy" / "lock").unlink()
    before = snapshot(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        run_quietly(finished[2].updated({"train.run_dir": str(tmp_path / "copy")}))
    assert snapshot(tmp_path) == before


def test_a_lock_that_its_holder_has_just_removed_is_made_anew(tmp_path):
    """Who locked the removed file would hold nothing that others see."""
    lock, removed = tmp_path / "run" / "lock", []

    def remove(frame, event, function):
        if event == "c_call" and function is fcntl.flock and not removed:
            removed.append(lock.unlink())

    before = sys.getprofile()
    sys.setprofile(remove)
    try:
        with RunDir(lock.parent).locked():
            assert removed and lock.read_text().strip() == str(os.getpid())
    finally:
        sys.setprofile(before)


def test_a_file_system_without_locks_is_not_said_to_be_in_use(tmp_path):
    def refuse(frame, event, function):
        if event == "c_call" and function is fcntl.flock:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = sys.getprofile()
    sys.setprofile(refuse)
    try:
        with pytest.raises(OSError, match=r"No locks available.*run/lock"):
            RunDir(tmp_path / "run").locked().__enter__()
    finally:
        sys.setprofile(before)


def hold_lock(pipe, path):
    with RunDir(path).locked():
        pipe.send("held")
        pipe.recv()


def test_one_process_per_run_directory_and_a_dead_one_does_not_count(tmp_path):
    here, there = Pipe()
    holder = the_nursery().start(hold_lock, tmp_path / "run", pipe=there)
    assert here.poll(PATIENCE_S)
    with (
        pytest.raises(ConfigError, match=f"is in use by process {holder.pid}"),
        RunDir(tmp_path / "run").locked(),
    ):
        pass
    holder.kill()
    holder.join()
    with RunDir(tmp_path / "run").locked():
        assert (tmp_path / "run" / "lock").read_text().strip() == str(os.getpid())


def test_nan_weights_stop_the_run_and_name_the_last_good_checkpoint(tiny, run_quietly, before_steps, monkeypatch):
    config = tiny(**{"train.steps": 10, "train.max_bad_steps": 3, "train.checkpoint_every": 2})

    @before_steps
    def _spoil(model, step):
        if step == 5:
            with torch.no_grad():
                model.layers[0].moe.experts.w_in.fill_(math.nan)

    with pytest.raises(TrainingDivergedError) as info:
        run_quietly(config)
    assert "3 steps in a row" in str(info.value) and "step_00000004" in str(info.value)
    metrics = lines(config)
    assert [m["skipped_steps"] for m in metrics] == [0, 0, 0, 0, 0, 1, 2, 3]
    assert metrics[-1]["loss"] is None and "NaN" not in RunDir(config.train.run_dir).metrics.read_text()
    monkeypatch.undo()
    result = run_quietly(config.updated({"train.resume": "auto"}))
    assert (result.resumed_from, result.step, result.skipped_steps) == (4, 10, 0)


def test_a_few_bad_steps_are_skipped_and_counted(tiny, run_quietly, before_steps):
    config = tiny(**{"train.max_bad_steps": 2})
    before_steps(spoil_gradients(lambda step: step in (2, 4)))
    result = run_quietly(config)
    assert (result.step, result.skipped_steps) == (8, 2)
    assert [m["skipped_steps"] for m in lines(config)] == [0, 0, 1, 1, 2, 2, 2, 2]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_run_goes_on_later(tiny, finished, run_quietly, before_steps, monkeypatch, number):
    config = tiny()
    before = signal.getsignal(number)
    before_steps(lambda model, step: step == 2 and os.kill(os.getpid(), number))
    result = run_quietly(config)
    assert (result.step, result.stopped_by) == (3, number)
    assert result.checkpoint.name == "step_00000003"
    assert signal.getsignal(number) is before
    monkeypatch.undo()
    assert run_quietly(config.updated({"train.resume": "auto"})).resumed_from == 3
    assert lines_of(config.train.run_dir) == lines_of(finished[8].train.run_dir)


@pytest.mark.parametrize("later", [True, False], ids=["later", "of the same moment"])
def test_a_second_ctrl_c(tiny, run_quietly, before_steps, threshold, later):
    """It interrupts at once, but not within a second: torchrun hands on what the terminal has already sent."""

    @before_steps
    def _send_twice(model, step):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    if later:
        threshold(stop, "SAME_S", -1.0)
        with pytest.raises(KeyboardInterrupt):
            run_quietly(tiny())
    else:
        assert run_quietly(tiny()).stopped_by == signal.SIGINT


def test_the_seed_decides_everything(tiny, run_quietly, tmp_path):
    runs = [
        tiny(**STOCHASTIC, **{"train.run_dir": str(tmp_path / str(i)), "train.seed": seed})
        for i, seed in enumerate((3, 3, 4))
    ]
    for i, config in enumerate(runs):
        torch.manual_seed(i)
        run_quietly(config)
    first, second, third = map(losses_of, runs)
    assert first == second and first != third


def test_a_run_leaves_the_callers_random_state_and_threads(tiny, run_quietly):
    torch.manual_seed(5)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    run_quietly(tiny(**{"train.steps": 2, "parallel.num_threads": 2}))
    assert torch.equal(torch.get_rng_state(), before) and torch.get_num_threads() == threads


def test_a_run_on_a_gpu_of_some_number_makes_it_the_current_one(tiny, run_quietly, monkeypatch):
    """Else a checkpoint would have the random state of another. Here there is none, which entering it says."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = tiny(**{"train.device": "cuda:1"})
    with (
        calls_of(torch.cuda.device.__init__) as calls,
        pytest.raises((RuntimeError, AssertionError)),
    ):
        run_quietly(config)
    assert [variables["device"] for variables, _ in calls] == [torch.device("cuda:1")]


def test_a_tensorboard_that_cannot_be_imported_is_one_line(tmp_path):
    pytest.importorskip("tensorboard")

    def fail(*_, **__):
        raise ImportError("No module named 'pkg_resources'")

    with pytest.raises(ConfigError, match="pkg_resources.*; mend its installation, or use"):
        trackers.open_tensorboard(tmp_path, last_step=0, make=fail)


def test_tensorboard_gets_the_same_numbers(tiny, run_quietly):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(**{"train.tensorboard": True})
    run_quietly(config)
    events = EventAccumulator(str(RunDir(config.train.run_dir).tensorboard))
    events.Reload()
    losses = [e.value for e in events.Scalars("training/loss")]
    expected = torch.tensor([m["loss"] for m in lines(config)]).tolist()
    assert losses == expected
    assert [e.step for e in events.Scalars("evaluation/eval_loss")] == [4, 8]


def test_without_tensorboard_nothing_is_missing(tiny, run_quietly, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert run_quietly(tiny(**{"train.tensorboard": True, "train.steps": 2})).step == 2


def test_weights_of_a_damaged_or_other_checkpoint_are_refused(tiny, run_quietly):
    config = tiny(**{"train.steps": 2})
    path = run_quietly(config).checkpoint
    other = config.updated({"model.num_layers": 3})
    with pytest.raises(CheckpointError, match="has no tensor layers.2"):
        load_run(config.train.run_dir).load_into(GPT(other.model).state_dict())
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
        load_run(config.train.run_dir)


def test_load_by_hand():
    load = measure_load([[4, 0, 2, 2], [1, 1, 1, 1]], 3)
    assert (load.load_imbalance, load.dropped_fraction, load.dead_experts) == (1.5, 0.25, 1)
    assert measure_load([], 0) is None
    assert measure_load([[0, 0]], 0).dead_experts == 2


@pytest.mark.parametrize(
    "broken",
    ["nonsense\n", "\n", '{"loss": 1}\n', '"step"\n', '{"step": 2, "lo', "\0\0\n", "\udcff\n", "[" * 50_000 + "\n"],
)  # fmt: skip
def test_a_broken_line_of_metrics_takes_no_other_with_it(tmp_path, broken):
    path = tmp_path / "m.jsonl"
    if broken.endswith("\n"):
        text = '{"step": 1}\n' + broken + '{"step": 2}\n{"step": 3}\n'
    else:
        text = '{"step": 1}\n{"step": 2}\n{"step": 3}\n' + broken
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    MetricsFile(path, last_step=9).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    MetricsFile(path, last_step=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_saved_run_with_options_without_effect_is_read(tiny):
    """They were once accepted, so a run that has them must still be read; it has the defaults."""
    config = tiny()
    run_dir = RunDir(config.train.run_dir)
    run_dir.path.mkdir(parents=True)
    run_dir.write_description(config, recipe="old", files={})
    values = json.loads(run_dir.config.read_text())
    values["optim"]["decay_fraction"] = 0.5
    values["model"]["moe"] |= {"min_capacity": 1, "cosine_dim": 7}
    run_dir.config.write_text(json.dumps(values))
    read, _ = run_dir.read_config()
    assert read == config
    del values["recipe"]
    with pytest.raises(ConfigError, match="no effect"):
        type(config).model_validate(values)
