"""A Swin Transformer in miniature: trained, killed, resumed, spread over two ranks, evaluated, classifying."""

import io
import json
import os
import signal

import pytest
from rich.console import Console
from tests.support.agent import Agent
from tests.support.patience import PATIENCE_S
from tests.support.pictures import stripes, write_folder

from expertmesh.cli.main import main
from expertmesh.config.family import SWIN, Family
from expertmesh.models.swin.task import SwinTask
from expertmesh.recipes.vision import swin_test
from expertmesh.testing.numerics import relative_error
from expertmesh.training.loop import train
from expertmesh.training.metrics import read_metrics

RELATIVE = 1e-9


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("vision")
    write_folder(root / "data", *stripes(60))
    return root


def run_of(folder, run_dir, **changes):
    values = {
        "data.path": (str(folder / "data"),),
        "data.cache_dir": str(folder / "cache"),
        "data.shift": 0.05,
        "data.mixup": 0.8,
        "data.cutmix": 1.0,
        "data.mix": 0.5,
        "train.dtype": "float64",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.run_dir": str(run_dir),
        "train.resume": "auto",
    }
    return swin_test().updated(values | changes)


def train_quietly(config, **options):
    return train(config, console=Console(file=io.StringIO()), **options)


def without_time(run_dir):
    return [
        {k: v for k, v in line.items() if k != "images_per_second"}
        for line in read_metrics(run_dir / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def straight(folder):
    result = train_quietly(run_of(folder, folder / "straight"))
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    assert result.items == 160
    return folder / "straight"


def test_stopped_and_resumed_to_the_bit(folder, straight, tmp_path):
    for steps in (7, 20):
        train_quietly(
            run_of(folder, tmp_path, **{"train.steps": steps, "optim.schedule_steps": 20})
        )
    lines = {line["step"]: line for line in without_time(tmp_path)}
    for line in without_time(straight):
        assert lines[line["step"]]["loss"] == line["loss"], line["step"]
        assert lines[line["step"]]["grad_norm"] == line["grad_norm"], line["step"]


class Mortal(SwinTask):
    """Kills its process in the first life, after a checkpoint."""

    def loss(self, model, batch, part):
        if part.step == 12 and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(model, batch, part)


def mortal_main(folder, run_dir):
    family = Family(SWIN.name, task=Mortal, config=SWIN.config, items="images")
    # capacity that fits all: what is dropped is decided among a rank's tokens
    train_quietly(run_of(folder, run_dir, **ROOMY), family=family)


ROOMY = {"model.moe.capacity_factor": 4.0, "model.moe.eval_capacity_factor": 4.0}


def test_killed_and_resumed_on_two_ranks(folder, tmp_path):
    train_quietly(run_of(folder, tmp_path / "alone", **ROOMY))
    agent = Agent(2, tmp_path)
    codes = agent.run(mortal_main, folder, tmp_path / "run", restarts=1, timeout_s=PATIENCE_S)
    assert codes == [0, 0], [agent.printed(rank)[-2000:] for rank in range(2)]
    assert agent.num_lives == 2
    oracle_lines = without_time(tmp_path / "alone")
    for line, oracle in zip(without_time(tmp_path / "run"), oracle_lines, strict=True):
        for name in ("loss", "grad_norm", "aux_loss", "eval_loss", "eval_accuracy"):
            if name in oracle:
                assert relative_error(line[name], oracle[name]) <= RELATIVE, (line["step"], name)


@pytest.fixture(scope="module")
def learned(folder):
    """Trained until it tells stripes apart."""
    changes = {"train.steps": 60, "train.eval_every": 60, "train.checkpoint_every": 60}
    changes |= {"train.batch_size": 16, "optim.lr": 1e-2, "data.mixup": 0.0, "data.cutmix": 0.0}
    changes |= {"data.mix": 1.0, "train.dtype": "float32", "model.drop_path": 0.0}
    result = train_quietly(run_of(folder, folder / "learned", **changes))
    assert result.evaluation["accuracy"] == 1.0
    return str(folder / "learned")


def test_it_classifies(learned, folder, capsys, tmp_path):
    images = f"{folder}/data/images-idx3-ubyte.gz"
    words = ["classify", "--run", learned, *(f"{images}@{i}" for i in (55, 57)), "--top", "1"]
    picture = tmp_path / "experts.png"
    assert main([*words, "--picture", str(picture)]) == 0
    first, second, said = capsys.readouterr().out.splitlines()
    assert first.split()[:2] == [f"{images}@55", "3"] and second.split()[1] == "1"
    assert said == f"picture: {picture}"
    image = pytest.importorskip("PIL.Image").open(picture)
    # the image and two MoE blocks, for two images
    assert image.size == (8 + 3 * 168, 22 + 2 * 182)
    assert len(image.getcolors(image.width * image.height)) > 100
    for i in (55, 57):  # an answer does not depend on the images beside it
        assert main(["classify", "--run", learned, f"{images}@{i}", "--top", "1"]) == 0
        assert capsys.readouterr().out.rstrip() in (first.rstrip(), second.rstrip())


def test_it_is_scored_at_other_capacities(learned, capsys):
    assert main(["classify", "--run", learned, "--score"]) == 0
    assert capsys.readouterr().out.startswith("accuracy 1.0000")
    losses = []
    for words in (["0.01"], ["0.5"], ["0.5", "--drop-policy", "first"]):
        assert main(["classify", "--run", learned, "--score", "--capacity", *words]) == 0
        losses.append(float(capsys.readouterr().out.split()[3]))
    assert len(set(losses)) == 3, "capacity and policy count"


@pytest.mark.parametrize(
    "words, text",
    [
        ([], "no image, or images and --score"),
        (["a.png", "--score"], "no image, or images and --score"),
        (["nowhere.png"], "nowhere.png: is not there"),
        ([__file__], "is no image that can be read"),
        (["--score", "--picture", "x.png"], "--picture x.png: shows images"),
        (["a.png", "--top", "0"], "--top 0: must be at least 1"),
        (["--score", "--capacity", "-1"], "--capacity -1.0: must be greater than 0"),
        (["--score", "--drop-policy", "first"], "nothing is dropped without --capacity"),
        (["--score", "--capacity", "1", "--drop-policy", "luck"], "--drop-policy luck: must be one of"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(learned, words, text, capsys):
    assert main(["classify", "--run", learned, *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error


def test_other_verbs_answer(learned, capsys):
    assert main(["report", "--run", learned, "--check"]) in (0, 1)
    out = capsys.readouterr().out
    assert "validation accuracy" in out and "5 nearest neighbours by pixels" in out
    assert main(["generate", "--run", learned, "a dog"]) in (1, 2)
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["train", "swin-s-moe8", "--dry-run"]) == 0
    assert "173,257,585 in all, 65,791,345 active per image" in capsys.readouterr().out


def test_a_damaged_list_of_classes_is_one_line(straight, folder, capsys):
    path = straight / "classes.json"
    whole = path.read_text()
    try:
        path.write_text(json.dumps({"no": "list"})[:-1])
        images = f"{folder}/data/images-idx3-ubyte.gz"
        assert main(["classify", "--run", str(straight), f"{images}@0"]) == 1
    finally:
        path.write_text(whole)
    error = capsys.readouterr().err
    assert "classes.json: is damaged" in error and error.count("\n") == 1
