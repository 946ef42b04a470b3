"""The files of a run belong to its checkpoints: another tokenizer or another model is refused by every verb that opens
it."""

import json
import re
import shutil

import pytest
import torch
from tests.support.hub_text import hub_folder

import expertmesh as em
from expertmesh.checkpoints.manifest import described, find_damage
from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.main import main
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.integrations.hub import convert
from expertmesh.integrations.transformers import ExpertMeshForCausalLM
from expertmesh.runs.run_dir import RunDir, load_run
from expertmesh.training.regroup import join, prune


@pytest.fixture(scope="module")
def trained(tiny_in, run_quietly, make_corpus, tmp_path_factory):
    """A run, and one whose tokenizer is of other texts."""
    at = tmp_path_factory.mktemp("bound")
    other = {"data.path": str(make_corpus(at / "texts", documents=30, seed=9))}
    for text in (at / "texts").iterdir():
        text.write_text(text.read_text().upper())
    for name, changes in (("own", {}), ("other", other)):
        run_quietly(tiny_in(at / name, **{"train.steps": 2}, **changes))
    return at


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained / "own" / "run", tmp_path / "known")


def swapped(run, trained):
    shutil.copyfile(trained / "other" / "run" / "tokenizer.json", run / "tokenizer.json")
    return r"tokenizer.json: has the SHA-256 \w+\.\.\., and \S+step_00000002 was trained with \w+\.\.\.; restore"


def edited(name, value):
    def edit(run, _):
        path = run / "config.json"
        config = json.loads(path.read_text())
        *sections, field = name.split(".")
        group = config
        for section in sections:
            group = group[section]
        assert group[field] != value
        group[field] = value
        path.write_text(json.dumps(config))
        return rf"config.json: has {name}=\S+, and \S+step_00000002 was trained with \S+; restore"

    return edit


CHANGES = {
    "tokenizer": swapped,
    "top_k": edited("model.moe.top_k", 1),
    "rope_base": edited("model.rope_base", 500.0),
    "weight_scale": edited("model.moe.weight_scale", 2.0),
}

TASK = "task: quiz\ndataset_path: json\ndataset_kwargs: {data_files: {test: quiz.jsonl}}\n"

WAYS = {
    "evaluate": lambda run, to: main(["evaluate", str(run), "--tasks", str(run / "task.yaml")]),
    "generate": lambda run, to: main(["generate", str(run), "alpha", "--max-tokens", "2"]),
    "report": lambda run, to: main(["report", str(run), "--samples", "0"]),
    "export": lambda run, to: main(["export", str(run), "--output", str(to)]),
    "export a checkpoint": lambda run, to: main(
        ["export", str(run / "checkpoints/step_00000002"), "--output", str(to)]
    ),
    "convert": lambda run, to: main(["convert", "--from", str(run), "--to", str(to)]),
    "quantize": lambda run, to: main(["quantize", str(run), "--to", str(to), "--format", "int8"]),
    "plan": lambda run, to: main(["plan", str(run), "--cluster", "a100-80x8"]),
    "prune": lambda run, to: main(["experts", "prune", str(run), "--keep", "2", "--to", str(to)]),
    "serve": lambda run, to: main(["serve", str(run), "--port", "0"]),
    "join": lambda run, to: main(["experts", "join", str(run), str(run), "--to", str(to)]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_every_verb_refuses_what_is_not_its_own(run, trained, tmp_path, monkeypatch, capsys, way, change):
    text = CHANGES[change](run, trained)
    (run / "task.yaml").write_text(TASK)
    (tmp_path / "site" / "lm_eval").mkdir(parents=True)  # evaluate asks first whether it is there
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert WAYS[way](run, tmp_path / "to") in (1, 2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert re.search(text, line), line
    assert not (tmp_path / "to").exists()


def as_teacher(run, make):
    return make(**{"distill.teacher": str(run)})


def as_beginning(run, make):
    return make(**{"train.init_from": str(run)})


def as_resumed(run, make):
    return make(**{"train.run_dir": str(run), "train.resume": "auto", "train.steps": 3})


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", [as_teacher, as_beginning, as_resumed])
def test_training_refuses_it(run, trained, tiny, run_quietly, use, change):
    text = CHANGES[change](run, trained)
    with pytest.raises((CheckpointError, ConfigError), match=f"{text}|has another tokenizer.json"):
        run_quietly(use(run, tiny))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("opened", [em.load, em.Engine, load_run, ExpertMeshForCausalLM.from_run])
def test_python_refuses_it(run, trained, opened, change):
    text = CHANGES[change](run, trained)
    with pytest.raises(CheckpointError, match=text):
        opened(run)


@pytest.fixture(scope="module")
def of_the_hub(tmp_path_factory):
    """A converted run, and files beside its tokenizer."""
    at = tmp_path_factory.mktemp("bound_hub")
    folder = hub_folder(at / "theirs", options={"chat_template": "{{ messages[0].content }}"})
    return convert(folder, at / "run").path


def changed(name):
    def change(run):
        (run / name).write_text((run / name).read_text() + "\n")
        return rf"{name}: has the SHA-256 \w+\.\.\., and \S+step_00000000 was trained with"

    return change


def lost(name):
    def change(run):
        (run / name).unlink()
        return rf"{name}: is missing, and \S+step_00000000 was trained with it; restore"

    return change


def more(name):
    def change(run):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("{}")
        return rf"{name}: is none of the files that \S+step_00000000 was trained with; remove it"

    return change


BESIDE = {
    "template": changed("hub/tokenizer_config.json"),
    "its config": changed("hub/config.json"),
    "lost": lost("hub/tokenizer_config.json"),
    "a template more": more("hub/chat_template.jinja"),
    "templates more": more("hub/additional_chat_templates/tool_use.jinja"),
    "added tokens": more("hub/added_tokens.json"),
    "beside the run's own": more("special_tokens_map.json"),
}


@pytest.mark.parametrize("change", BESIDE)
def test_files_beside_a_tokenizer_belong_to_the_run(of_the_hub, tmp_path, capsys, change):
    run = shutil.copytree(of_the_hub, tmp_path / "known")
    text = BESIDE[change](run)
    for way in ("generate", "convert", "export", "quantize", "report"):
        assert WAYS[way](run, tmp_path / "to") in (1, 2)
        assert re.search(text, capsys.readouterr().err), way
    for opened in (em.load, em.Engine):
        with pytest.raises(CheckpointError, match=text):
            opened(run)


def test_a_run_that_begins_with_a_hub_folder_keeps_its_files_as_they_were(of_the_hub, tiny, run_quietly, tmp_path):
    """Also when the folder changes or goes afterwards."""
    theirs = shutil.copytree(of_the_hub.parent / "theirs", tmp_path / "theirs")
    changes = {"train.init_from": str(theirs), "train.run_dir": str(tmp_path / "run")}
    changes |= {"train.resume": "auto", "data.seq_len": 16, "optim.warmup_steps": 1}
    for steps, change in ((1, changed("tokenizer_config.json")), (2, None), (3, shutil.rmtree)):
        run_quietly(tiny(**{"train.steps": steps}, **changes))
        if change is not None:
            change(theirs)
    values = json.loads((load_run(tmp_path / "run").with_weights().checkpoint / "state.json").read_text())
    assert {"tokenizer.json", "hub/tokenizer_config.json", "hub/config.json"} <= set(values["files"])


def test_what_may_differ_does(run, capsys):
    edits = {"train.batch_size": 8, "train.dtype": "bfloat16", "data.path": ["x"], "optim.lr": 1.0}
    for name, value in {**edits, "model.moe.backend": "torch"}.items():
        edited(name, value)(run, None)
    assert main(["generate", str(run), "alpha", "--max-tokens", "2"]) == 0


def test_a_lost_tokenizer_is_learned_again_only_if_it_is_the_same(run, tiny, run_quietly, make_corpus, tmp_path):
    (run / "tokenizer.json").unlink()
    run_quietly(as_resumed(run, tiny))
    assert (run / "tokenizer.json").is_file()
    state = list_checkpoints(run / "checkpoints")[-1] / "state.json"
    values = json.loads(state.read_text())
    assert set(values["files"]) == {"tokenizer.json"}


def test_a_checkpoint_of_before_the_record_opens(run):
    """Only the model is compared: it had no hashes of files."""
    for path in list_checkpoints(run / "checkpoints"):
        state = path / "state.json"
        values = json.loads(state.read_text())
        del values["files"]
        state.write_text(json.dumps(values))
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"]["state.json"] = described(state)
        (path / "manifest.json").write_text(json.dumps(manifest))
    assert em.load(run).run.checkpoint
    edited("model.moe.top_k", 1)(run, None)
    with pytest.raises(CheckpointError, match="model.moe.top_k=1"):
        em.load(run)


@pytest.mark.parametrize("version", [99, 0, "1", None])
def test_a_manifest_of_another_version_is_refused(run, version):
    path = list_checkpoints(run / "checkpoints")[-1] / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": version}))
    for opened in (em.load, lambda run: find_damage(path.parent)):
        with pytest.raises(CheckpointError, match=f"format version {version}, this"):
            opened(run)


def test_what_other_verbs_write_opens(run, tmp_path):
    loaded = em.load(run)
    em.save(*loaded, tmp_path / "saved", like=run)
    prune(run, tmp_path / "pruned", keep=2)
    join(run, run, tmp_path / "joined")
    for name in ("saved", "pruned", "joined"):
        assert em.load(tmp_path / name).precision.compute_dtype == loaded.precision.compute_dtype
        values = json.loads((load_run(tmp_path / name).checkpoint / "state.json").read_text())
        assert set(values["files"]) == {"tokenizer.json"}
    assert torch.is_tensor(loaded.model.embedding.weight) and RunDir(run).has_run()
