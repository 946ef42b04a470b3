"""What a verb will write is tried before its work: the run that it would read is damaged, and the target is the one
named."""

import re
import shutil
from pathlib import Path

import pytest
from tests.support.serving import make_run

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.cli.main import main


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("targets") / "run")
    (path,) = list_checkpoints(run / "checkpoints")
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-9])
    return run


FOLDERS = {
    "convert": ["convert", "--from", "RUN", "--to", "TARGET"],
    "quantize": ["quantize", "RUN", "--format", "int8", "--to", "TARGET"],
    "prune": ["experts", "prune", "RUN", "--keep", "2", "--to", "TARGET"],
    "join": ["experts", "join", "RUN", "RUN", "--to", "TARGET"],
}
FILES = {
    "export": ["export", "RUN", "--output", "TARGET"],
    "overwrite": ["export", "RUN", "--overwrite", "--output", "TARGET"],
    "generate": ["generate", "RUN", "a", "--output", "TARGET"],
    "report": ["report", "RUN", "--page", "TARGET"],
    "plan": ["plan", "RUN", "--cluster", "a100-80x8", "--page", "TARGET"],
    "bench": ["bench", "comm", "--plot", "TARGET"],
    "bench into a cluster": ["bench", "comm", "--cluster", "TARGET"],
    "doctor": ["doctor", "--cluster", "TARGET"],
}

NO_FOLDERS = {
    "a file": ("file", "exists already"),
    "a folder": ("folder", "exists already"),
    "an empty folder": ("empty", "exists already"),
    "a link to nowhere": ("link", "exists already"),
    "below a file": ("file/to", "is below the file"),
    "far below a file": ("file/more/to", "is below the file"),
    "what takes no files": ("/proc/to", "cannot be made"),
}
NO_FILES = {
    "a folder": ("folder", "is a folder|is no regular file"),
    "below a file": ("file/to", "there is no folder"),
    "in no folder": ("gone/to", "there is no folder"),
    "a device": ("/dev/full", "is no regular file"),
    "what takes no files": ("/proc/to", "cannot be written"),
}
CASES = [
    *((verb, target) for verb in FOLDERS.items() for target in NO_FOLDERS.items()),
    *((verb, target) for verb in FILES.items() for target in NO_FILES.items()),
]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
@pytest.mark.parametrize(("verb", "target"), CASES, ids=[f"{verb[0]}-{target[0]}" for verb, target in CASES])
def test_a_target_is_tried_before_the_work(damaged, tmp_path, capsys, verb, target):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    before = sorted(tmp_path.rglob("*"))
    (_, words), (_, (name, rule)) = verb, target
    places = {"RUN": str(damaged), "TARGET": str(tmp_path / name)}
    assert main([places.get(word, word) for word in words]) == 2
    error = capsys.readouterr().err
    assert re.search(rule, error) and error.count("\n") == 1, error
    assert places["TARGET"] in error
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["report.html"])
def test_the_page_beside_a_run_is_tried_as_well(damaged, tmp_path, capsys, name):
    run = shutil.copytree(damaged, tmp_path / "run")
    (run / name / "inside").mkdir(parents=True)
    assert main(["report", str(run), "--samples", "0"]) == 2
    assert "is no regular file" in capsys.readouterr().err
