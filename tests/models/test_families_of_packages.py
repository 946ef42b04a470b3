"""A family and its verb come with an installed package, by entry points, and are known by their plain names."""

import json
import subprocess
import sys

import pytest
from tests.support.packages import write_package
from tests.support.patience import PATIENCE_S

import expertmesh as em
from expertmesh.cli.main import help_text, main
from expertmesh.errors import ConfigError
from expertmesh.models.registry import ENTRY_POINTS, FAMILIES, find_family, recipe
from expertmesh.runs.open import open_model

FAMILY = '''
from expertmesh.models.family import Family, Metric
from expertmesh.models.gpt.config import GPTRunConfig
from expertmesh.models.gpt.recipes import RECIPES as GPTS


class QuietRun(GPTRunConfig):
    family: str = "quiet"


def quiet_test():
    """A GPT whose embedding is small."""
    small = {"model.dim": 16, "model.num_heads": 2, "model.max_seq_len": 16, "data.seq_len": 16}
    values = GPTS["gpt-moe-test"]().updated(small).model_dump()
    return QuietRun.model_validate(values | {"family": "quiet"})


QUIET = Family(
    "quiet", task="package_of_quiet.task:Quiet", config=QuietRun, recipes={"quiet-test": quiet_test},
    items="tokens", metric=Metric("bits_per_byte", "bits per byte", "bits/byte"),
    generates_text=True, files=("tokenizer.json",),
)
'''
TASK = """
from expertmesh.models.gpt.builder import GPTBuilder
from expertmesh.models.gpt.task import GPTTask


class Built(GPTBuilder):
    is_built_empty = False

    def build(self, *, device, dtype):
        model = super().build(device=device, dtype=dtype)
        model.is_quiet = True
        return model


class Quiet(GPTTask):
    builder_class = Built
"""
VERB = """
from expertmesh.cli.family_verbs import Verb

WHISPER = Verb(
    "whisper", "say it quietly", run="package_of_quiet.whisper:run",
    memory_fix="whisper less",
)
"""
WHISPER = """
from typing import Annotated

from expertmesh.cli.parse import parsed
from expertmesh.config.fields import Operation, Spelling
from expertmesh.errors import ConfigError

class WhisperVerb(Operation):
    \"""Says words quietly.\"""

    words: Annotated[tuple[str, ...], Spelling("WORD", is_word=True)] = ()
    \"""words to say\"""
    dots: Annotated[int, Spelling(stands_for=("num_dots",))] = 3
    \"""number of dots between words\"""

def run(argv):
    options = parsed(WhisperVerb, argv)
    if options.words == ("a", "lot"):
        raise MemoryError
    if options.dots < 1:
        raise ConfigError("num_dots", options.dots, "must be at least 1", "say one")
    print(*options.words, sep=options.dots * "." + " ")
    return 3
"""


@pytest.fixture
def quiet(tmp_path, monkeypatch):
    """A package that adds a family and a verb; the text that runs of it learn."""
    stem = "package_of_quiet"
    files = {"__init__": "", "family": FAMILY, "task": TASK, "verb": VERB, "whisper": WHISPER}
    points = {
        ENTRY_POINTS: {"quiet": f"{stem}.family:QUIET"},
        "expertmesh.verbs": {"whisper": f"{stem}.verb:WHISPER"},
    }
    packages = tmp_path / "packages"
    write_package(packages, stem, {f"{stem}/{n}.py": text for n, text in files.items()}, points)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"{i} is {i * i}\n" for i in range(900)))
    return packages


WORDS = "--data.path text.txt --train.steps 2 --train.device cpu --train.tensorboard false"


def test_a_family_is_trained_used_and_planned_by_its_plain_name(quiet, capsys):
    assert main(["train", "quiet-test", *WORDS.split(), "--train.run-dir", "run"]) == 0
    assert main(["train", "--family", "quiet", *WORDS.split(), "--train.run-dir", "other"]) == 0
    assert "tokens/s" in capsys.readouterr().out
    opened = open_model("run")
    assert opened.run.family is FAMILIES["quiet"] and opened.model.is_quiet
    assert main(["generate", "run", "7 is", "--max-tokens", "3", "--greedy"]) == 0
    assert capsys.readouterr().out.startswith("7 is")
    assert main(["report", "run"]) == 0
    assert "bits" in capsys.readouterr().out
    for target in ("quiet-test", "run"):
        assert main(["plan", target, "--cluster", "h100x8"]) == 0
        assert target in capsys.readouterr().out
    assert em.train(recipe("quiet-test", {"data.path": "text.txt", "train.steps": 1}), quiet=True)


def test_its_verb_is_a_verb(quiet, capsys):
    assert "whisper    say it quietly" in help_text()
    assert main(["whisper", "a", "b"]) == 3
    assert capsys.readouterr().out == "a... b\n"
    assert main(["whisper", "--dots", "0"]) == 2
    assert main(["whisper", "a", "lot"]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "error: --dots 0: must be at least 1; say one"
    assert said[1] == "error: this machine is out of memory; whisper less"
    assert main(["wisper"]) == 2
    assert "did you mean whisper?" in capsys.readouterr().err


BROKEN = {
    "a module that is not there": ("import no_such_module\n", "cannot be imported .*no_such_module"),
    "a module that fails": ("raise RuntimeError('two\\nlines')\n", "cannot be imported .*two lines"),
    "no such name": ("", "cannot be imported"),
    "no family": ("BROKEN = 3\n", "is no Family of this family"),
    "another name": (
        "from package_of_quiet.family import QUIET as BROKEN\n", "is no Family of this family"
    ),
    "recipes that fail": (
        ("import dataclasses as d, package_of_quiet.family as f\nBROKEN = d.replace(f.QUIET, name='broken', "
        "recipes='no_such_recipes:A')\n"),
        "importing 'no_such_recipes:A' failed",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_package_is_one_line_and_others_work(name, quiet, capsys):
    text, said = BROKEN[name]
    point = {ENTRY_POINTS: {"broken": "package_of_broken:BROKEN"}}
    write_package(quiet, "package_of_broken", {"package_of_broken.py": text}, point)
    sys.modules.pop("package_of_broken", None)
    with pytest.raises(ConfigError, match=said) as caught:
        find_family("broken").find_recipes()
    assert "\n" not in str(caught.value) and "family=broken" in str(caught.value)
    assert main(["train", "--family", "broken", "broken-test"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--family broken: " in error
    for one in ("quiet-test", "gpt-moe-test"):
        words = ["train", one, "--data.path", "text.txt", "--train.device", "cpu", "--dry-run"]
        assert main(words) == 0
    assert {"gpt", "quiet"} <= FAMILIES.keys() and "quiet-test" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="recipe=broken-test: unknown recipe; did you mean"):
        recipe("broken-test")


def test_a_package_of_a_name_that_is_taken_changes_nothing(quiet):
    point = {ENTRY_POINTS: {"gpt": "package_of_thief:GPT"}, "expertmesh.verbs": {"train": "x:y"}}
    write_package(quiet, "package_of_thief", {}, point)
    assert find_family("gpt").name == "gpt" and FAMILIES.names.count("gpt") == 1
    assert "train a model from a recipe" in help_text()


WITHOUT = """
import contextlib, io, json, sys

class Absent:
    def find_spec(self, name, *more):
        if name == "expertmesh_families":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
from expertmesh.cli.main import main
found = []
for line in sys.argv[1:]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(line.split())
    found.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""

LINES = {
    "--help": (0, ""),
    "train gpt-moe-test --dry-run --train.device cpu": (0, ""),
    "translate run --to de a": (2, ("error: verb=translate: is in the package expertmesh_families, which is not "
                                   "installed")),
    "classify": (2, "error: verb=classify: is in the package expertmesh_families, which is not installed"),
    "train --family swin": (2, "error: --family swin: is in the package expertmesh_families, which is not installed"),
    "train swin-test": (2, "; not imported: seq2seq, swin ("),
    "report run": (2, "seq2seq: is in the package expertmesh_families, which is not installed"),
}  # fmt: skip


def test_the_core_works_without_the_families_of_its_distribution(tmp_path):
    """All command lines in one process, which imports everything once."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"family": "seq2seq"}')
    command = [sys.executable, "-c", WITHOUT, *LINES]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    for (line, (code, said)), (got, out, err) in zip(LINES.items(), json.loads(done.stdout), strict=True):
        assert (got, err.count("\n")) == (code, 1 if code else 0), (line, err)
        assert said in err, (line, err)
        assert "translate" not in out and "classify" not in out, line
