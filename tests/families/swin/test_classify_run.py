"""A Swin Transformer in miniature: trained, killed, resumed, spread over two ranks, evaluated, classifying."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from tests.support.agent import Agent
from tests.support.full_screen import full_screen
from tests.support.patience import PATIENCE_S
from tests.support.pictures import stripes, write_folder
from tests.support.runs import (
    assert_resumed_to_the_bit,
    assert_same_lines,
    lines_of,
    mortal,
    train_quietly,
)

from expertmesh.cli.main import main
from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run
from expertmesh.training.check_run_memory import check_run_memory
from expertmesh.training.optim import freeze
from expertmesh_families.swin.family import SWIN
from expertmesh_families.swin.recipes import swin_test
from expertmesh_families.swin.task import SwinTask


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
        # room for all: who is dropped is decided among a rank's tokens
        "model.moe.capacity_factor": 4.0,
        "model.moe.eval_capacity_factor": 4.0,
        "train.dtype": "float64",
        "train.device": "cpu",
        "train.tensorboard": False,
        "train.run_dir": str(run_dir),
        "train.resume": "auto",
    }
    return swin_test().updated(values | changes)


@pytest.fixture(scope="module")
def straight(folder):
    result = train_quietly(run_of(folder, folder / "straight"))
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    assert result.items == 160
    return folder / "straight"


def test_stopped_and_resumed_to_the_bit(folder, straight, tmp_path):
    assert_resumed_to_the_bit(partial(run_of, folder), straight, tmp_path)


def mortal_main(folder, run_dir):
    family = Family(SWIN.name, task=mortal(SwinTask, step=12), config=SWIN.config, items="images")
    train_quietly(run_of(folder, run_dir), family=family)


def test_killed_and_resumed_on_two_ranks(folder, straight, tmp_path):
    agent = Agent(2, tmp_path)
    codes = agent.run(mortal_main, folder, tmp_path / "run", restarts=1, timeout_s=PATIENCE_S)
    assert codes == [0, 0], [agent.printed(rank)[-2000:] for rank in range(2)]
    assert agent.num_lives == 2
    names = "loss", "grad_norm", "aux_loss", "eval_loss", "eval_accuracy"
    assert_same_lines(lines_of(tmp_path / "run"), lines_of(straight), *names)


@pytest.fixture(scope="module")
def learned(folder):
    """Trained until it tells stripes apart."""
    changes = {"train.steps": 60, "train.eval_every": 60, "train.checkpoint_every": 60}
    changes |= {"train.batch_size": 16, "optim.lr": 5e-3, "data.mixup": 0.0, "data.cutmix": 0.0}
    changes |= {"data.mix": 1.0, "train.dtype": "float32", "model.drop_path": 0.0}
    changes |= {"model.init_std": 0.15, "model.label_smoothing": 0.0}
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


def test_the_picture_is_written_before_the_screen(learned, folder, tmp_path):
    words = ["classify", "--run", learned, f"{folder}/data/images-idx3-ubyte.gz@55"]
    picture = tmp_path / "experts.png"
    with full_screen():
        assert main([*words, "--picture", str(picture)]) == 1
    assert picture.is_file()


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
        ([__file__, "a.png", "b.png"], "3 of 3 images cannot be used"),
        (["--score", "--picture", "x.png"], "--picture x.png: shows images"),
        (["a.png", "--picture", "x.txt"], "--picture x.txt: its ending is that of no picture"),
        (["a.png", "--top", "0"], "--top 0: must be at least 1"),
        (["--score", "--top", "5"], "--top 5: has no effect with --score"),
        (["--score", "--fit", "pad"], "--fit pad: has no effect with --score"),
        (["--score", "--capacity", "-1"], "--capacity -1.0: must be greater than 0"),
        (["--score", "--drop-policy", "first"], "nothing is dropped without --capacity"),
        (["--score", "--capacity", "1", "--drop-policy", "luck"], "--drop-policy luck: must be one of"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(learned, words, text, capsys):
    assert main(["classify", "--run", learned, *words]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error


def test_an_image_of_another_size_is_fitted_as_asked(learned, tmp_path, capsys):
    large = tmp_path / "large.png"
    pytest.importorskip("PIL.Image").new("L", (20, 30)).save(large)
    words = ["classify", "--run", learned, str(large), "--fit"]
    assert main([*words, "exact"]) == 2
    assert "must be that; use --fit resize" in capsys.readouterr().err
    assert main([*words, "resize"]) == 0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("classes.json", r"classes.json: has the SHA-256 \w+..., and \S+ was trained with"),
        ("config.json", r"config.json: has model.moe.top_k=\d+, and \S+ was trained with"),
    ],
)
def test_files_of_another_run_are_refused(learned, folder, tmp_path, capsys, name, words):
    run = shutil.copytree(learned, tmp_path / "run")
    values = json.loads((run / name).read_text())
    if name == "config.json":
        values["model"]["moe"]["top_k"] += 1
    (run / name).write_text(json.dumps(values, indent=3))
    assert main(["classify", str(run), f"{folder}/data/images-idx3-ubyte.gz@55"]) == 1
    error = capsys.readouterr().err
    assert re.search(words, error) and error.count("\n") == 1, error


def test_other_verbs_answer(learned, capsys):
    assert main(["report", "--run", learned, "--check"]) in (0, 1)
    out = capsys.readouterr().out
    assert "validation accuracy" in out and "5 nearest neighbours by pixels" in out
    for words in (["generate"], ["translate", "--to", "de"]):
        assert main([words[0], "--run", learned, *words[1:], "a dog"]) == 2
        error = capsys.readouterr().err
        assert "family swin: its models generate no text" in error and error.count("\n") == 1
    assert main(["train", "swin-s-moe8", "--dry-run"]) == 0
    assert "173,257,585 in all, 65,791,345 active per image" in capsys.readouterr().out


@pytest.mark.parametrize("text", ['{"no": "list"', "[" * 50_000], ids=["cut", "nested"])
def test_a_damaged_list_of_classes_is_one_line(straight, folder, capsys, text):
    path = straight / "classes.json"
    whole = path.read_text()
    try:
        path.write_text(text)
        images = f"{folder}/data/images-idx3-ubyte.gz"
        assert main(["classify", "--run", str(straight), f"{images}@0"]) == 1
    finally:
        path.write_text(whole)
    error = capsys.readouterr().err
    assert "classes.json: is damaged" in error and error.count("\n") == 1


FINE = {
    "model.image_size": 32,
    "model.window_size": 8,
    "model.num_classes": 3,
    "model.dim": 24,
    "model.moe.num_experts": (2,),
    "train.steps": 3,
    "optim.warmup_steps": 1,
    "train.freeze": ("experts", "router"),
}


def fine_main(folder, run_dir):
    train_quietly(run_of(folder, run_dir, **FINE, **begin(folder)))


def begin(folder):
    return {"train.init_from": str(folder / "straight"), "data.path": (str(folder / "few"),)}


@pytest.fixture(scope="module")
def fine(folder, straight):
    """Other images, windows and classes, from the weights of another run; experts and routers stay as they are."""
    write_folder(folder / "few", *stripes(30, classes=3))
    fine_main(folder, folder / "fine")
    return folder / "fine"


def weights_of(run_dir):
    run = load_run(run_dir)
    return open_model(run).model


def test_fine_tuning_with_other_windows_and_frozen_experts(straight, fine):
    before, after = weights_of(straight), weights_of(fine)
    assert after.config.pretrained_window_sizes == (4, 4) and after.config.windows == (8, 8)
    assert after.config.dim == 8 and after.config.moe.num_experts == (4,)
    old, new = before.state_dict(), after.state_dict()
    same = {n for n in old if old[n].shape == new[n].shape and torch.equal(old[n], new[n])}
    frozen = {name for name in old if ".moe.experts." in name or ".moe.router." in name}
    assert frozen and frozen <= same
    assert not any("qkv" in name or "patches" in name for name in same)
    assert new["head.weight"].shape == (3, 16)


def test_fine_tuning_goes_on_without_what_it_began_with(folder, straight, fine, tmp_path):
    shutil.copytree(fine, tmp_path / "run")
    changes = begin(folder) | {"train.init_from": "gone", "train.steps": 4, "train.resume": "auto"}
    result = train_quietly(run_of(folder, tmp_path / "run", **FINE | changes))
    assert (result.resumed_from, result.step) == (3, 4)
    assert weights_of(tmp_path / "run").config == weights_of(fine).config


@pytest.mark.parametrize("data, has_head", [("data", True), ("few", False)])
def test_a_head_of_other_classes_is_not_taken(folder, fine, tmp_path, data, has_head):
    """However many there are: by their names, too."""
    task = SwinTask(run_of(folder, tmp_path, **begin(folder) | {"data.path": (str(folder / data),)}))
    images = task.prepare()
    model = task.builder.build(device="cpu", dtype=torch.float32)
    found = task.builder.inherited(model, load_run(folder / "straight").config, images)
    assert ("head.weight" in found) == bool(model.head.weight.any()) == has_head


def test_fine_tuning_on_two_ranks(folder, fine, tmp_path, two_ranks):
    two_ranks.run(fine_main, folder, tmp_path / "run")
    assert_same_lines(lines_of(tmp_path / "run"), lines_of(fine), "loss", "grad_norm", "aux_loss")


def test_too_many_images_at_once_are_refused(folder, tmp_path):
    config = run_of(folder, tmp_path, **{"train.batch_size": 2**40})
    said = r"too large for memory: .*; lower train.micro_batch_size \(train --dry-run"
    with pytest.raises(ConfigError, match=said):
        check_run_memory(SWIN, config, torch.device("cpu"), num_ranks=1)


def test_beginning_and_freezing_are_refused_in_one_line(folder, fine, tmp_path, capsys):
    words = [
        "train",
        "swin-test",
        "--data.path",
        str(folder / "few"),
        "--train.run-dir",
        str(tmp_path),
    ]
    for more, text in (
        (["--train.init-from", str(tmp_path / "no")], "does not exist"),
        (
            ["--train.init-from", str(folder / "straight"), "--model.dim", "24"],
            "brings its model, which has 8; leave it out",
        ),
        (["--train.freeze", "heads"], "must be one of experts, router"),
        (["--train.freeze", "router,router"], "names something twice"),
    ):
        assert main([*words, *more]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1, error
    dense = {"model.moe": MoEConfig(num_experts=()), "train.freeze": ("router",)}
    with pytest.raises(ConfigError, match="train.freeze=.*: the model has no experts"):
        run_of(folder, tmp_path, **dense)
    config = run_of(folder, tmp_path, **dense, **{"train.init_from": "what may have some"})
    model = SwinTask(config).builder.build(device="cpu", dtype=torch.float32)
    with pytest.raises(ConfigError, match="train.freeze=router: the model has no experts"):
        freeze(model, config.train.freeze)
    assert main(["train", "gpt-moe-test", "--train.init-from", str(fine)]) == 2
    assert "is of family swin and this run of gpt" in capsys.readouterr().err
