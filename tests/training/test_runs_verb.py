"""`expertmesh runs`: what is below a folder, and less of it."""

import shutil

import pytest

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.main import main
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.runs import find_runs, look_at


@pytest.fixture(scope="module")
def trained(tiny_in, run_quietly, tmp_path_factory):
    """Four checkpoints, of which the last is the best."""
    folder = tmp_path_factory.mktemp("runs")
    run_quietly(tiny_in(folder, **{"train.checkpoint_every": 2, "train.keep_last": 4}))
    return folder / "run"


@pytest.fixture
def runs(trained, tmp_path):
    for name in ("a", "deeper/b"):
        shutil.copytree(trained, tmp_path / name)
    (tmp_path / "other").mkdir()
    return tmp_path


def steps_in(path):
    return [int(one.name[-8:]) for one in list_checkpoints(RunDir(path).checkpoints)]


def test_the_list(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")  # wide enough for any folder of the tests
    assert main(["runs", str(runs)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["run", "recipe", "steps"]
    assert [line.split()[0] for line in lines] == [str(runs / "a"), str(runs / "deeper" / "b")]
    assert all(" 8 of 8 " in line and line.endswith(" MB") for line in lines)
    one = look_at(runs / "a")
    assert one.num_checkpoints == 4 and one.loss is not None and one.evaluation is not None
    assert one.num_bytes == sum(p.stat().st_size for p in (runs / "a").rglob("*") if p.is_file())
    assert find_runs(runs / "a") == [runs / "a"]


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_the_list_fits_the_terminal(runs, capsys, columns, monkeypatch):
    """But for a path that is longer: it stands alone on its line, whole."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(runs)
    assert main(["runs", "."]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    text = " ".join(line.strip() for line in lines)
    assert (len(lines) == 3) == (columns >= 80), "a line each"
    for word in ("a", "deeper/b", "gpt-moe-test", "8 of 8", "MB", "validation", "checkpoints"):
        assert word in text


def test_old_checkpoints_go_and_runs_go_on(runs, capsys):
    config = RunDir(runs / "deeper" / "b").config
    config.write_text(config.read_text().replace('"keep_every": null', '"keep_every": 4'))
    assert main(["runs", str(runs), "--keep", "1"]) == 0
    assert steps_in(runs / "a") == [8] and steps_in(runs / "deeper" / "b") == [4, 8]
    assert "removed " in capsys.readouterr().out.splitlines()[-1]


def test_the_newest_whole_checkpoint_stays(runs, caplog):
    for path in RunDir(runs / "a").checkpoints.glob("step_0000000[68]"):
        (path / "manifest.json").write_text("{}")
    assert main(["runs", str(runs / "a"), "--keep", "1"]) == 0
    assert 4 in steps_in(runs / "a") and 2 not in steps_in(runs / "a")


def test_a_run_that_trains_is_left_as_it_is(runs, capsys):
    with RunDir(runs / "a").locked():
        assert main(["runs", str(runs), "--keep", "1"]) == 1
        out = capsys.readouterr().out
    assert steps_in(runs / "a") == [2, 4, 6, 8] and steps_in(runs / "deeper" / "b") == [8]
    assert "running" in out and "left as it is" in out and "is in use" in out


@pytest.mark.parametrize("spoil", ["{", "[]", "{}"])
def test_a_damaged_run_is_listed(runs, capsys, spoil):
    RunDir(runs / "a").config.write_text(spoil)
    assert main(["runs", str(runs)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "8 of ?" in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["runs", "{}/nowhere"], "is no folder"),
        (["runs", "{}/other"], "no run is below it"),
        (["runs", "{}", "--keep", "0"], "--keep 0: must be at least 1"),
        (["runs", "{}", "--keep", "two"], "--keep two: must be a whole number"),
        (
            ["runs", "", "--keep", "1"],
            "--run '': must not be empty",
        ),  # as of a variable that is not set
    ],
)
def test_mistakes(runs, capsys, words, said):
    assert main([word.format(runs) for word in words]) == 2
    assert said in capsys.readouterr().err
