"""A family of one's own, all of it in this file: a mixture-of-experts classifier of scikit-learn's digits.

It is trained, killed, resumed, spread over two ranks and reported, by name on the command line, and nothing else in the
project knows it.
"""

import json

import pytest
import torch
import torch.nn.functional as F
from pydantic import Field
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from tests.support.ranks import world_of
from tests.support.runs import assert_same_lines, lines_of, mortal, train_quietly
from torch import nn

from expertmesh import MoELayer
from expertmesh.cli.main import main
from expertmesh.config.base import Config
from expertmesh.config.run import OptimConfig, RunConfig, TrainConfig
from expertmesh.data.tensors import TensorData
from expertmesh.errors import ConfigError
from expertmesh.models.builder import ModelBuilder
from expertmesh.models.family import Family, Metric
from expertmesh.models.own_module import OwnModule
from expertmesh.models.registry import find_family
from expertmesh.models.task import Baseline, Loss, Task
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.run_dir import load_run
from expertmesh.training.loop import train

NAME = f"{__name__}:DIGITS"


class DigitsModel(Config):
    """The classifier."""

    dim: int = Field(default=32, gt=0)
    """Width."""
    num_experts: int = Field(default=4, gt=1)
    """Experts of its only layer of them."""


class DigitsRun(RunConfig):
    """A run of the classifier."""

    family: str = "digits"
    model: DigitsModel = DigitsModel()
    optim: OptimConfig = OptimConfig(lr=1e-2, warmup_steps=2)
    train: TrainConfig = TrainConfig(
        steps=8, batch_size=16, dtype="float64", device="cpu", run_dir="digits", eval_every=4,
        checkpoint_every=2, tensorboard=False,
    )  # fmt: skip


class Classifier(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.inner = nn.Linear(64, config.dim)
        # Groups of eight images, so that the balance loss means the same on any number of ranks.
        self.moe = MoELayer(
            dim=config.dim,
            hidden_dim=16,
            num_experts=config.num_experts,
            top_k=2,
            router_noise="gumbel",
            routing_group_size=8,
        )
        self.outer = nn.Linear(config.dim, 10)

    def forward(self, images_TD, token_index=None):
        x_TD = F.relu(self.inner(images_TD))
        y_TD, stats = self.moe(x_TD, token_index=token_index)
        return self.outer(x_TD + y_TD), stats


class Built(ModelBuilder):
    def build(self, *, device, dtype):
        return Classifier(self.config.model).to(device, dtype)


class Digits(Task):
    builder_class = Built

    def prepare(self):
        from sklearn.datasets import load_digits  # takes seconds, of this file alone

        images, labels = load_digits(return_X_y=True)
        images = torch.tensor(images, dtype=torch.float64) / 16
        labels = torch.tensor(labels)
        return TensorData(
            (images[:1500], labels[:1500]),
            (images[1500:], labels[1500:]),
            seed=self.config.train.seed,
            source="digits",
        )

    def loss(self, model, batch, part):
        images, labels = batch
        logits, stats = model(images, part.token_index(1, images.device))
        return Loss(F.cross_entropy(logits, labels, reduction="sum"), [stats])

    def measure(self, model, batch, part):
        images, labels = batch
        logits, _ = model(images)
        return {
            "loss": F.cross_entropy(logits, labels, reduction="sum"),
            "accuracy": (logits.argmax(1) == labels).sum(),
            "items": len(labels),
        }

    def baseline(self, data):
        return Baseline("a guess", "guess", 0.1)


DIGITS = Family(
    "digits",
    task=Digits,
    config=DigitsRun,
    items="images",
    metric=Metric("accuracy", "accuracy", "accuracy", higher_is_better=True),
)


def run_of(folder, **changes):
    return DigitsRun().updated({"train.run_dir": str(folder), "train.resume": "auto"} | changes)


def test_by_name_on_the_command_line(tmp_path, capsys):
    """Trained, stopped, gone on with, reported; its options are options, and its words are its own."""
    words = ["--family", NAME, "--train.run-dir", str(tmp_path / "run"), "--train.keep-last", "9"]
    words += ["--train.checkpoint-every", "60"]
    assert main(["train", *words, "--dry-run", "--model.num-experts", "8"]) == 0
    assert '"num_experts": 8' in capsys.readouterr().out
    assert main(["train", *words, "--train.steps", "4", "--optim.schedule-steps", "60"]) == 0
    out = capsys.readouterr().out
    for text in (
        "1,500 training and 297 validation samples",
        "images/s",
        "accuracy",
        "64 images in",
    ):
        assert text in out, out
    more = ["--train.steps", "60", "--train.resume", "auto"]
    assert main(["train", "default", *words, *more]) == 0
    assert main(["report", "--run", str(tmp_path / "run"), "--family", NAME]) == 0
    out = capsys.readouterr().out
    for text in (
        "images/s",
        "validation accuracy",
        "on all validation data, after step 60",
        "a guess",
        "better than the guess",
    ):
        assert text in out, out
    assert "sample 1" not in out
    straight = run_of(tmp_path / "straight", **{"train.steps": 60, "train.checkpoint_every": 60})
    assert train_quietly(straight, family=DIGITS).evaluation["accuracy"] > 0.5
    assert lines_of(tmp_path / "straight") == lines_of(tmp_path / "run")


@pytest.mark.parametrize(
    "words, text",
    [
        (["train", "--family", "digitz"], "--family digitz: unknown, known here: gpt"),
        (["train", "--family", "nowhere.at.all:X"], "importing 'nowhere.at.all' failed"),
        (["train", "--family", f"{__name__}:Digits"], "has no expertmesh Family of the name"),
        (["train", "--family"], "--family needs a value"),
        (["train", "--family", NAME, "--family", NAME], "given twice"),
        (["train", "--family", NAME, "gpt-moe-demo"], "unknown recipe 'gpt-moe-demo'"),
        (["train", "--family", NAME, "--model.top-k", "1"], "unknown option --model.top-k"),
        (["train", "--family", NAME, "--model.num-experts", "1"], "must be greater than 1"),
        (["train", "--family", NAME, "--parallel.tp-degree", "2", "--dry-run"], "no such thing"),
        (
            ["train", "--family", NAME, "--train.activation-checkpointing", "--train.run-dir", "x"],
            "--train.activation-checkpointing: family digits has no such thing",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words, text, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error
    assert not list(tmp_path.glob("*/checkpoints"))


def test_a_run_of_its_own_family_only(tmp_path, capsys):
    """A run's own word for its family imports nothing."""
    folder = tmp_path / "run"
    train_quietly(run_of(folder, **{"train.steps": 2}), family=DIGITS)
    assert json.loads((folder / "config.json").read_text())["family"] == "digits"
    assert load_run(folder, DIGITS).config == run_of(folder, **{"train.steps": 2})
    assert main(["report", "--run", str(folder)]) == 2
    assert "is of family digits, which is not of this package" in capsys.readouterr().err
    assert main(["report", "--run", str(folder), "--family", "gpt"]) == 2
    assert "is of family digits" in capsys.readouterr().err
    assert main(["generate", "--run", str(folder), "x"]) == 2
    with pytest.raises(ConfigError, match="has 4"):
        train_quietly(run_of(folder, **{"train.steps": 4, "model.num_experts": 8}), family=DIGITS)
    with pytest.raises(ConfigError, match="needs a GPTRunConfig, got a DigitsRun"):
        train(run_of(folder), family=find_family("gpt"))


class Forgetful(Digits):
    """Returns no routing statistics."""

    def loss(self, model, batch, part):
        return Loss(super().loss(model, batch, part).total)


class Untold(Digits):
    """Does not say which sample has which label."""

    labels = ("even", "odd")


@pytest.mark.parametrize(
    "task, said",
    [
        (Forgetful, "has 0 entries and the model has 1 MoE layers"),
        (Untold, "family=digits: its task defines labels but not label_of; write its label_of"),
    ],
)
def test_what_a_task_forgets_is_one_line(tmp_path, task, said):
    family = Family("digits", task=task, config=DigitsRun)
    with pytest.raises(ConfigError, match=said):
        train_quietly(run_of(tmp_path / "run"), family=family)


class Unbuilt(Task):
    """Says not how its model is made."""

    prepare = loss = measure = None


def test_a_task_without_a_builder_is_one_line():
    with pytest.raises(ConfigError, match="Unbuilt: does not set builder_class; set it"):
        Unbuilt(DigitsRun())


def spread_normalised():
    task = OwnModule(RunConfig(), module=nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    place = {"device": torch.device("cpu"), "dtype": torch.float32}
    return len(list(task.builder.place(**place, ranks=Ranks(world_of())).parameters()))


def test_a_module_with_a_counter_is_the_same_on_all_ranks(two_ranks):
    """BatchNorm counts its batches in a tensor without axes."""
    assert two_ranks.run(spread_normalised) == [4, 4]


def mortal_main(folder):
    family = Family("digits", task=mortal(Digits, step=5), config=DigitsRun, items="images")
    train_quietly(run_of(folder), family=family)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_killed_and_resumed_on_some_ranks(tmp_path, num_ranks):
    straight = tmp_path / "straight"
    train_quietly(run_of(straight), family=DIGITS)
    agent = Agent(num_ranks, tmp_path)
    codes = agent.run(mortal_main, tmp_path / "killed", restarts=1, timeout_s=PATIENCE_S)
    assert codes == [0] * num_ranks, [agent.printed(rank)[-2000:] for rank in range(num_ranks)]
    assert agent.num_lives == 2
    found, expected = lines_of(tmp_path / "killed"), lines_of(straight)
    if num_ranks == 1:
        assert found == expected
    assert_same_lines(found, expected, "loss", "grad_norm", "aux_loss")
