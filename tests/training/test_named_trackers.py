"""Trackers by name: what services get, and that a run that goes on stays one there."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from expertmesh.checkpoints.store import list_checkpoints, step_of
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.training.loop import train
from expertmesh.training.named_trackers import MLflow, WandB


class Wandb:
    """What a run uses of wandb."""

    def __init__(self):
        self.inits, self.rows, self.ends = [], [], 0

    def init(self, **given):
        self.inits.append(given)
        return self

    def log(self, values, *, step):
        self.rows.append((step, dict(values)))

    def finish(self):
        self.ends += 1


class Mlflow:
    """What a run uses of mlflow."""

    def __init__(self):
        self.starts, self.params, self.rows, self.ends = [], {}, [], 0

    def start_run(self, **given):
        self.starts.append(given)
        return SimpleNamespace(info=SimpleNamespace(run_id="its-id"))

    def log_params(self, values):
        self.params |= values

    def log_metrics(self, values, *, step):
        self.rows.append((step, dict(values)))

    def end_run(self):
        self.ends += 1


def test_wandb_gets_every_step_and_one_run(tmp_path):
    service = Wandb()
    for step in (1, 2):
        tracker = WandB(tmp_path, {"train": {"steps": 2}}, module=service)
        tracker.write({"step": step, "loss": float("nan")}, None)
        tracker.close()
    first, second = service.inits
    assert first["id"] == second["id"] and first["resume"] == "allow"
    assert (first["name"], first["config"]) == (tmp_path.name, {"train": {"steps": 2}})
    assert [step for step, _ in service.rows] == [1, 2] and service.ends == 2
    assert set(service.rows[0][1]) == {"loss"}


def test_mlflow_gets_what_is_finite_and_one_run(tmp_path):
    service = Mlflow()
    for step in (1, 2):
        tracker = MLflow(tmp_path, {"a": {"b": "x" * 900}}, module=service)
        tracker.write({"step": step, "loss": 2, "lr": float("nan")}, None)
        tracker.close()
    new, known = service.starts
    assert new == {"run_name": tmp_path.name, "nested": True}
    assert known == {"run_id": "its-id", "nested": True}
    assert service.params == {"a.b": "x" * 500} and service.ends == 2
    assert service.rows == [(1, {"loss": 2.0}), (2, {"loss": 2.0})]


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_file_of_names_is_said(tmp_path, text):
    (tmp_path / "trackers.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"trackers.json: is damaged; delete it"):
        WandB(tmp_path, {}, module=Wandb())


def test_a_run_writes_to_services_by_name(tiny, run_quietly, monkeypatch):
    services = {"wandb": Wandb(), "mlflow": Mlflow()}
    for name, service in services.items():
        service.__spec__ = SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, service)
    run_quietly(tiny(**{"train.trackers": ("wandb", "mlflow")}))
    for service in services.values():
        assert [step for step, _ in service.rows] == list(range(1, 9)) and service.ends == 1
        assert "eval_loss" in service.rows[7][1]


@pytest.mark.parametrize("call", ["log", "finish"])
def test_a_service_that_fails_is_dropped_with_one_warning(call, tiny, run_quietly, monkeypatch, capsys):
    def fail(*given, **named):
        calls.append(given)
        raise RuntimeError("API request failed:\nConnection refused")

    service, calls = Wandb(), []
    service.__spec__ = SimpleNamespace(name="wandb")
    setattr(service, call, fail)
    monkeypatch.setitem(sys.modules, "wandb", service)
    config = tiny(**{"train.trackers": ("wandb",)})
    result = train(config, console=Console(width=200))
    assert result.step == 8 and result.checkpoint is not None and len(calls) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: wandb: API request failed: Connection refused; ")


def test_an_error_of_a_users_tracker_is_raised_after_a_checkpoint(tiny):
    class Mine:
        def write(self, values, experts):
            if values["step"] == 3:
                raise ConnectionError("is gone")

    config = tiny()
    with pytest.raises(ConnectionError, match="is gone"):
        train(config, console=Console(quiet=True), trackers=[Mine()])
    assert step_of(list_checkpoints(Path(config.train.run_dir) / "checkpoints")[-1]) == 3


def test_a_service_that_is_not_installed_is_refused_before_the_work(tiny, run_quietly, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny(**{"train.trackers": ("wandb",)})
    with pytest.raises(ConfigError, match=r"train.trackers='?wandb'?.*is not installed; pip install wandb"):
        run_quietly(config)
