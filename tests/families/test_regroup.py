"""Experts of trained models are left out by use, and united; what is made translates, classifies, and is trained
further."""

import json
import shutil

import pytest
import torch
from tests.oracle.numerics import assert_close_fp64
from tests.support.calls import calls_of
from tests.support.mistakes import reseal
from tests.support.pictures import stripes, write_folder
from tests.support.runs import train_quietly
from torch import nn

from expertmesh.cli.main import main
from expertmesh.config.moe import MoEConfig
from expertmesh.errors import ConfigError
from expertmesh.models.bound_files import hashes_in
from expertmesh.runs.open import open_model
from expertmesh.runs.run_dir import load_run
from expertmesh.training.expert_use import read_use
from expertmesh.training.init_from import with_init_from
from expertmesh.training.metrics import read_metrics
from expertmesh.training.regroup import checked_layers, count_choices, join, moe_layers, prune
from expertmesh.training.threads import settle_threads
from expertmesh_families.seq2seq.family import SEQ2SEQ
from expertmesh_families.seq2seq.recipes import translate_test
from expertmesh_families.swin.recipes import swin_test

COMMON = {
    "train.steps": 4,
    "train.eval_every": 4,
    "train.checkpoint_every": 4,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.tensorboard": False,
    "optim.warmup_steps": 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("regroup")
    (place / "lines").mkdir()
    for split, count in (("train", 40), ("val", 20)):
        for code, word in (("de", "Hunde"), ("en", "dogs")):
            lines = "".join(f"{i} {word} {i * i}\n" for i in range(count))
            (place / "lines" / f"{split}.{code}").write_text(lines)
    write_folder(place / "images", *stripes(40))
    return place


def translation(folder, name, **changes):
    values = {
        "model.dim": 16,
        "model.init_std": 0.3,
        "model.moe.num_experts": (4, 3),
        "model.moe.router_bias": True,
        "data.path": (str(folder / "lines"),),
        "data.cache_dir": str(folder / "cache"),
        "train.run_dir": str(folder / name),
    }
    return translate_test().updated(COMMON | values | changes)


def vision(folder, name, **changes):
    values = {
        "data.path": (str(folder / "images"),),
        "data.cache_dir": str(folder / "cache"),
        "model.moe.router": "cosine",
        "model.moe.cosine_dim": 8,
        "model.moe.eval_capacity_factor": None,  # room depends on the number of experts
        "train.run_dir": str(folder / name),
    }
    return swin_test().updated(COMMON | values | changes)


@pytest.fixture(scope="module")
def trained(folder):
    for seed, name in enumerate(("first", "second")):
        train_quietly(translation(folder, name, **{"train.seed": seed}))
    train_quietly(vision(folder, "images-run"))
    return folder


def opened(path):
    return open_model(path)


class Without(nn.Module):
    """A router whose other experts are never chosen, nor in any sum."""

    def __init__(self, router, kept):
        super().__init__()
        self.router, self.kept = router, kept

    def forward(self, x_TD):
        logits_TE = self.router(x_TD)
        out = torch.full_like(logits_TE, -torch.inf)
        out[:, self.kept] = logits_TE[:, self.kept]
        return out


def choices(found, run_config, max_samples=None):
    return count_choices(
        found.task,
        found.model,
        found.task.prepare(),
        batch_size=run_config.train.batch_size,
        max_samples=max_samples,
        precision=found.precision,
    )


@torch.no_grad()
@pytest.mark.parametrize("name", ["first", "images-run"])
def test_a_pruned_model_is_the_model_that_may_choose_no_others(trained, tmp_path, name):
    source, target = trained / name, tmp_path / "pruned"
    config = load_run(source).config
    made = prune(source, target, keep=2)
    assert made.num_experts == (2, 2)
    assert load_run(target).config.model.moe.num_experts == (2,)
    whole, pruned = opened(source), opened(target)
    counts = choices(whole, config)
    for (layer_name, layer), share in zip(moe_layers(whole.model).items(), made.kept, strict=True):
        count_E = counts[layer_name]
        kept = sorted(sorted(range(len(count_E)), key=lambda e, c=count_E: (-int(c[e]), e))[:2])
        assert share == float(count_E[kept].sum() / count_E.sum())
        assert int(count_E.sum()) > 0 and len(count_E) > 2
        layer.router = Without(layer.router, kept)
    batch = next(iter(whole.task.prepare().validation(8, 8)))
    inputs = (batch[0], batch[2]) if name == "first" else (batch[0],)
    ours, theirs = (found.model(*inputs) for found in (pruned, whole))
    field = "logits_NV" if name == "first" else "logits_BC"
    assert_close_fp64(getattr(ours, field), getattr(theirs, field), what=field)


def test_pruning_measures_the_number_of_threads(trained, tmp_path):
    with calls_of(settle_threads) as calls:
        prune(trained / "first", tmp_path / "made", keep=2, max_samples=1)
    assert len(calls) == 1


def test_use_is_counted_on_the_samples_asked_for(trained):
    found, config = opened(trained / "first"), load_run(trained / "first").config
    some, every = (choices(found, config, max_samples=n) for n in (3, None))
    for name, count_E in every.items():
        assert 0 < int(some[name].sum()) < int(count_E.sum())
    assert not any(layer._forward_hooks for layer in moe_layers(found.model).values())


def test_images_of_several_folders_are_told_apart(trained, tmp_path):
    write_folder(tmp_path / "others", *stripes(20, seed=1))
    paths = (str(trained / "images"), str(tmp_path / "others"))
    train_quietly(vision(trained, tmp_path / "run", **{"data.path": paths}))
    for line in read_use(tmp_path / "run" / "experts.jsonl"):
        found = line["counts_by_label"]
        assert set(found) == {"images", "others"}
        for layer, counts in enumerate(line["counts"]):
            pairs = zip(found["images"][layer], found["others"][layer], strict=True)
            assert counts == [sum(pair) for pair in pairs]


def test_directions_are_told_apart_unless_there_are_too_many(folder, tmp_path, caplog):
    assert set(labels_of(translation(folder, "none"))) == {"de-en", "en-de"}
    (tmp_path / "lines").mkdir()
    for code in ("aa", "bb", "cc", "dd", "ee", "ff", "gg", "hh", "ii"):
        for split in ("train", "val"):
            (tmp_path / "lines" / f"{split}.{code}").write_text("one\ntwo\n")
    path = {"data.path": (str(tmp_path / "lines"),)}
    assert labels_of(translation(folder, "none", **path)) == ()
    assert "has 72 directions" in caplog.text


def labels_of(config):
    task = SEQ2SEQ.open_task(config)
    task.prepare()
    return task.labels


def test_a_joined_model_has_the_experts_of_both(trained, tmp_path, capsys):
    first, second, target = trained / "first", trained / "second", tmp_path / "joined"
    assert main(["experts", "join", str(first), str(second), "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}: 2 layers of 8, 6 experts\n"
    ours, theirs, both = (opened(path).model.state_dict() for path in (first, second, target))
    for name, tensor in both.items():
        if ".experts." in name or "router" in name:
            assert torch.equal(tensor, torch.cat((ours[name], theirs[name]))), name
        elif "rope" not in name:
            assert torch.equal(tensor, (ours[name] + theirs[name]) / 2), name
    assert main(["translate", "--run", str(target), "--to", "de", "7 dogs 49"]) == 0


def test_a_model_joined_with_itself_chooses_as_before(trained, tmp_path):
    """Each expert is there twice, one of two equal logits wins, and its weight, of a softmax over twice as many, is
    half."""
    source = trained / "first"
    join(source, source, tmp_path / "twice")
    whole, twice = opened(source), opened(tmp_path / "twice")
    batch = next(iter(whole.task.prepare().validation(8, 8)))
    with torch.no_grad():
        ours, theirs = (found.model(batch[0], batch[2]).stats[0] for found in (twice, whole))
    assert torch.equal(ours.topk_expert_ids_TK % 4, theirs.topk_expert_ids_TK)
    assert_close_fp64(2 * ours.topk_weights_TK, theirs.topk_weights_TK, what="weights")


def test_what_was_made_is_trained_further(trained, tmp_path, capsys):
    words = ["experts", "prune", str(trained / "first"), "--keep", "2", "--samples", "6"]
    assert main([*words, "--to", str(tmp_path / "few")]) == 0
    assert "2 layers of 2 experts, which had " in capsys.readouterr().out
    begin = {"train.init_from": str(tmp_path / "few"), "model.dropout": 0.3, "model.dim": 32}
    config = with_init_from(translation(trained, tmp_path / "tuned", **begin), SEQ2SEQ)
    assert config.model.moe.num_experts == (2,) and config.model.dim == 16
    assert config.model.dropout == 0.3, "what the weights do not fix is the run's own"
    assert config.data.encode_with == str(tmp_path / "few" / "tokenizer.json")
    result = train_quietly(config)
    assert result.evaluation["loss"] < result.initial_evaluation["loss"]
    evaluated = read_metrics(trained / "first" / "metrics.jsonl")[-1]["eval_loss"]
    assert abs(result.initial_evaluation["loss"] - evaluated) < abs(
        read_metrics(trained / "first" / "metrics.jsonl")[0]["initial_eval_loss"] - evaluated
    ), "it begins nearer to where the first one ended than to where that one began"


@pytest.mark.parametrize(
    "words, text",
    [
        (["prune", "first", "--keep", "4"], "--keep 4: must be below the 4 that there are"),
        (
            ["prune", "first", "--keep", "0"],
            "--keep 0: must be at least 1",
        ),
        (["prune", "first"], "needs --keep K"),
        (["prune", "first", "second", "--keep", "2"], "got 2 runs; name one"),
        (["join", "first"], "got 1 runs; name two"),
        (["join", "first", "second", "--keep", "2"], "--keep 2: has no effect with join"),
        (["join", "first", "images-run"], "is of family swin"),
        (["join", "first", "nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(trained, tmp_path, words, text, capsys):
    names = [str(trained / word) if word in ("first", "second", "images-run", "nowhere") else word for word in words]
    assert main(["experts", *names, "--to", str(tmp_path / "made")]) == 2
    error = capsys.readouterr().err
    assert text in error and error.count("\n") == 1, error
    assert not (tmp_path / "made").exists()


def test_models_without_such_experts_are_refused(trained, tmp_path):
    dense = {"model.moe": MoEConfig(num_experts=())}
    train_quietly(vision(trained, tmp_path / "dense", **dense))
    with pytest.raises(ConfigError, match="its model has no experts"):
        prune(tmp_path / "dense", tmp_path / "made", keep=2)
    with pytest.raises(ConfigError, match="exists already"):
        prune(trained / "first", tmp_path / "dense", keep=2)
    other = {"train.seed": 3, "model.ffn_hidden_dim": 32}
    train_quietly(translation(trained, tmp_path / "other", **other))
    with pytest.raises(ConfigError, match="its model.ffn_hidden_dim is 32 and that of .* 64;"):
        join(trained / "first", tmp_path / "other", tmp_path / "made")


@pytest.mark.parametrize(
    "target, changes, text",
    [
        ("made", {"keep": 2.0}, "keep=2.0: must be a whole number"),
        ("made", {"max_samples": 0}, "max_samples=0: must be a whole number of at least 1"),
        ("/proc/none/made", {}, "to=/proc/none/made: cannot be made: "),
    ],
)
def test_mistakes_are_found_before_the_data_are_read(trained, tmp_path, target, changes, text):
    run_dir = copied(trained / "first", tmp_path / "run", **{"data.path": ["nowhere"]})
    with pytest.raises(ConfigError, match=text):
        prune(run_dir, tmp_path / "deep" / target, **{"keep": 2} | changes)
    assert list(tmp_path.iterdir()) == [run_dir], "what was made to see whether it can be is gone"


def copied(source, target, files=None, **changes):
    """A run that was trained with other options, by their dotted names, and with further files."""
    shutil.copytree(source, target)
    for name, text in (files or {}).items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(text)
    values = json.loads((target / "config.json").read_text())
    for name, value in changes.items():
        *sections, last = name.split(".")
        place = values
        for section in sections:
            place = place[section]
        assert place[last] != value
        place[last] = value
    (target / "config.json").write_text(json.dumps(values))
    told = {"config": values, "files": hashes_in(target, SEQ2SEQ)}
    for checkpoint in target.glob("checkpoints/step_*"):
        state = json.loads((checkpoint / "state.json").read_text())
        (checkpoint / "state.json").write_text(json.dumps({**state, **told}))
        reseal(checkpoint)
    return target


def test_use_is_counted_on_the_data_of_the_run_only(trained, tmp_path):
    shutil.copytree(trained / "lines", tmp_path / "lines")
    (tmp_path / "lines" / "val.de").write_text("Katzen\n" * 20)
    path = {"data.path": [str(tmp_path / "lines")]}
    run_dir = copied(trained / "first", tmp_path / "run", **path)
    with pytest.raises(ConfigError, match="are not what the run in .* was trained on"):
        prune(run_dir, tmp_path / "made", keep=2)
    join(trained / "first", trained / "second", tmp_path / "both")
    with pytest.raises(ConfigError, match="both: came from elsewhere, without data"):
        prune(tmp_path / "both", tmp_path / "made", keep=2)


def test_runs_join_whatever_differs_in_speed_and_training(trained, tmp_path):
    other = {"model.dropout": 0.3, "model.moe.backend": "reference", "model.moe.z_loss_weight": 0.5}
    second = copied(trained / "second", tmp_path / "second", **other)
    assert join(trained / "first", second, tmp_path / "made").num_experts == (8, 6)
    other = copied(trained / "second", tmp_path / "other", **{"model.moe.weight_scale": 2.0})
    with pytest.raises(ConfigError, match=r"its model\.moe\.weight_scale is 2\.0 and that of .* 1\.0;"):
        join(trained / "first", other, tmp_path / "again")


def test_what_belongs_to_the_tokenizer_goes_with_it(trained, tmp_path):
    files = {"hub/chat_template.jinja": "{{ messages }}"}
    source = copied(trained / "first", tmp_path / "run", files, **{"train.eval_every": 2})
    join(source, trained / "second", tmp_path / "made")
    assert (tmp_path / "made" / "hub" / "chat_template.jinja").read_text() == "{{ messages }}"


def test_experts_that_choose_are_all_used_alike(trained, tmp_path):
    changes = {"model.moe.router": "expert_choice"}
    with pytest.raises(ConfigError, match="whose experts are all used alike"):
        prune(copied(trained / "first", tmp_path / "run", **changes), tmp_path / "made", keep=2)


def test_experts_that_are_modules_of_their_own_are_refused(trained):
    found = opened(trained / "first")
    for layer in moe_layers(found.model).values():
        layer.experts = nn.Identity()
    with pytest.raises(ConfigError, match=r"modules of their own \(Identity\)"):
        checked_layers(load_run(trained / "first"), found)
