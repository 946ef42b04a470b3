"""A run's data are found from any folder: whole paths from its start, and those of older runs where they were
trained."""

import json

import pytest

from expertmesh.cli.main import main
from expertmesh.runs.run_dir import RunDir


@pytest.fixture
def place(tiny, run_quietly, make_corpus, tmp_path, monkeypatch):
    """A folder in which a run was trained on relative paths, and another one in which verbs are called."""
    (tmp_path / "trained").mkdir()
    (tmp_path / "called").mkdir()
    make_corpus(tmp_path / "trained" / "texts")
    monkeypatch.chdir(tmp_path / "trained")
    changes = {"data.path": "texts", "train.run_dir": "runs/tx", "data.cache_dir": "cache"}
    run_quietly(tiny(**{"train.steps": 2}, **changes))
    monkeypatch.chdir(tmp_path / "called")
    return tmp_path


def of_before(run):
    """What older runs keep: the paths as they were typed."""
    text = run.joinpath("config.json").read_text()
    values = json.loads(text)
    values["data"] |= {"path": "texts", "cache_dir": "cache"}
    run.joinpath("config.json").write_text(json.dumps(values))


VERBS = {
    "prune": ["experts", "prune", "RUN", "--keep", "2", "--to", "pruned"],
    "report": ["report", "RUN", "--samples", "0"],
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("is_old", [False, True])
def test_verbs_find_them_from_another_folder(place, verb, is_old, capsys):
    run = place / "trained" / "runs" / "tx"
    values = json.loads((run / "config.json").read_text())["data"]
    assert values["path"] == str(place / "trained" / "texts")
    assert values["cache_dir"] == str(place / "trained" / "cache")
    if is_old:
        of_before(run)
    assert main([str(run) if word == "RUN" else word for word in VERBS[verb]]) == 0
    assert "not judged" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_moved_data_are_named(place, verb, capsys):
    run, moved = place / "trained" / "runs" / "tx", place / "moved"
    (place / "trained" / "texts").rename(moved)
    words = [str(run) if word == "RUN" else word for word in VERBS[verb]]
    assert main([*words, "--data.path", str(moved)]) == 0
    said = capsys.readouterr().out
    assert "not judged" not in said, said


def test_it_goes_on_with_either(place, tiny, run_quietly, monkeypatch):
    monkeypatch.chdir(place / "trained")
    for path, steps in (("texts", 3), (str(place / "trained" / "texts"), 4)):
        changes = {"data.path": path, "train.run_dir": "runs/tx", "data.cache_dir": "cache"}
        result = run_quietly(tiny(**{"train.steps": steps, "train.resume": "auto"}, **changes))
        assert result.step == steps
    assert RunDir("runs/tx").has_run()
