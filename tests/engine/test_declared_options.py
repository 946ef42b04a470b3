"""An option of a request is declared once: two files give a new one to Python, the command line, HTTP, help and the
reference."""

import ast
import contextlib
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
from tests.support.pages import ROOT
from tests.support.patience import PATIENCE_S
from tests.support.serving import make_run, served

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.config.sampling import GUIDES, OF_OUTPUTS
from expertmesh.serve.schema import ChatRequest, CompletionRequest

DECLARATION = {
    "config/sampling.py": [
        (
            '    """Minimum probability of a token, relative to the most likely one."""\n',
            """    epsilon_cutoff: float = Field(default=0.0, ge=0, le=1)
    \"\"\"Minimum probability of a token other than the most likely one (Hewitt et al. 2022).\"\"\"
""",
        )
    ],
    "ops/sampling.py": [
        (
            "    min_p_R: Tensor  # FP64 smallest probability relative to the largest; 0: all\n",
            "    epsilon_cutoff_R: Tensor\n",
        ),
        (
            "    probs = ordered.softmax(-1)\n",
            "    probs[:, 1:] *= probs[:, 1:] >= batch.epsilon_cutoff_R[:, None]\n",
        ),
    ],
}
"""Two files, and what is written behind which lines."""
PROMPT = "def main("
HELP = "minimum probability of a token other than the most likely one (Hewitt et al. 2022)"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Folder of a copy of the sources with the option."""
    copy = tmp_path_factory.mktemp("copy") / "src"
    # with the bytecode of all that does not change, but for what another process is just writing
    shutil.copytree(ROOT / "src", copy, ignore=shutil.ignore_patterns("*.pyc.*"))
    for name, changes in DECLARATION.items():
        path = copy / "expertmesh" / name
        text = path.read_text(encoding="utf-8")
        for behind, added in changes:
            assert text.count(behind) == 1
            text = text.replace(behind, behind + added)
        path.write_text(text, encoding="utf-8")
    return copy


@pytest.mark.slow
def test_a_new_option_is_there(source, tmp_path):
    with pytest.raises(em.ConfigError, match="unknown option"):
        em.SamplingParams(epsilon_cutoff=0.5)
    # one process, whose traceback names the place: each would import everything and write a model
    command = f"from {__name__} import Finds; Finds.everywhere({str(source)!r}, {str(tmp_path)!r})"
    path = os.pathsep.join([str(source), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr


def said(*words):
    """What a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        assert main([*words]) == 0
    return out.getvalue()


class Finds:
    """Where the option is found, in a process that imports the copy."""

    @staticmethod
    def everywhere(source, place):
        for where in (Finds.python, Finds.help, Finds.reference, Finds.command_line, Finds.http):
            where(source, place)

    @staticmethod
    def python(source, place):
        assert Path(em.__file__).is_relative_to(source)
        assert em.SamplingParams(epsilon_cutoff=0.5).epsilon_cutoff == 0.5
        with pytest.raises(em.ConfigError, match=r"epsilon_cutoff=2: must be at most 1; for"):
            em.SamplingParams(epsilon_cutoff=2)

    @staticmethod
    def command_line(source, place):
        words = ["generate", str(make_run(Path(place) / "tiny")), "--max-tokens", "9"]
        greedy, drawn = said(*words, "--greedy", PROMPT), said(*words, "--seed", "1", PROMPT)
        assert said(*words, "--seed", "1", "--epsilon-cutoff", "1", PROMPT) == greedy != drawn

    @staticmethod
    def http(source, place):
        body = {"prompt": PROMPT, "max_tokens": 9, "seed": 1}
        with served(Path(place) / "tiny", is_forked=False) as server:

            def text(**more):
                answer = httpx2.post(f"{server.address}/v1/completions", json=body | more)
                return answer.json()["choices"][0]["text"] if answer.is_success else answer.json()

            assert text(epsilon_cutoff=1) == text(temperature=0) != text()
            assert text(epsilon_cutoff=2)["error"]["param"] == "epsilon_cutoff"
            schemas = httpx2.get(f"{server.address}/openapi.json").json()["components"]["schemas"]
        for name in ("CompletionRequest", "ChatRequest"):
            field = schemas[name]["properties"]["epsilon_cutoff"]
            assert field["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 1.0}
            assert field["description"].lower().rstrip(".") == HELP.lower()

    @staticmethod
    def help(source, place):
        (line,) = (one for one in said("generate", "--help").splitlines() if "--epsilon" in one)
        assert line.split() == f"--epsilon-cutoff X {HELP} (default: 0)".split()

    @staticmethod
    def reference(source, place):
        """The page shows the fields of the class in their source with their docstrings; see mkdocs.yml."""
        page = (ROOT / "docs" / "reference" / "engine.md").read_text(encoding="utf-8")
        assert "::: expertmesh.SamplingParams" in page
        shown = ast.parse((Path(source) / "expertmesh/config/sampling.py").read_text())
        (kind,) = (one for one in shown.body if getattr(one, "name", "") == "SamplingParams")
        names = [one.target.id for one in kind.body if isinstance(one, ast.AnnAssign)]
        field = em.SamplingParams.model_fields["epsilon_cutoff"]
        assert "epsilon_cutoff" in names and field.description.lower().rstrip(".") == HELP.lower()


def test_every_option_is_where_it_belongs():
    names = {*em.SamplingParams.model_fields}
    shown = said("generate", "--help")
    of_command = {name for name in names if f"--{name.replace('_', '-')} " in shown}
    assert of_command == names - OF_OUTPUTS
    for body in (CompletionRequest, ChatRequest):
        of_body = names & {*body.model_fields}
        assert names - of_body <= {"prompt_logprobs", "kept_special_ids", *GUIDES}
        fields = body.model_fields
        for name in of_body - {"logprobs"}:
            assert fields[name].description == em.SamplingParams.model_fields[name].description


CASES = {
    "temperature": (
        {"temperature": "1"},
        "temperature='1': must be a finite number from 0 to 3e.38; give one",
    ),
    "top_k": ({"top_k": 2**63}, r"top_k=9223372036854775808: must be at most 2\^63 - 1; lower it"),
    "stop": ({"stop": ["a", ""]}, r"stop\[1\]='': must be a string of 1 to 1024 characters"),
    "half a character": ({"stop": "\ud800"}, r"stop\[0\]=\\ud800: must be a string"),
    "stops": ({"stop": ["a"] * 65}, "must have at most 64 entries; give fewer"),
    "stop_token_ids": ({"stop_token_ids": [1, -1]}, r"stop_token_ids\[1\]=-1: must be a token id"),
    "logit_bias": ({"logit_bias": {1: 101}}, r"logit_bias\[1\]=101: must be at most 100"),
    "near": ({"temprature": 1}, "temprature=1: unknown option; did you mean temperature\\?"),
    "two": ({"min_tokens": 3, "max_tokens": 2}, "min_tokens=3: must be at most max_tokens=2; ask"),
}


@pytest.mark.parametrize(("given", "line"), CASES.values(), ids=CASES)
def test_errors_name_value_rule_and_fix(given, line):
    with pytest.raises(em.ConfigError, match=line) as caught:
        em.SamplingParams(**given)
    assert "\n" not in str(caught.value) and str(caught.value).encode()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--stop", ""], "--stop '': must be a string of 1 to 1024 characters; give one"),
        (["--logit-bias", "x"], "--logit-bias x: must be numbers by token id; for exam"),
        (["--min-tokens", "3", "--max-tokens", "2"], "--min-tokens 3: must be at most --max-toke"),
        (["--seed", "2.5"], "--seed 2.5: must be a whole number from 0 to 2^63 - 1; give one"),
    ],
)
def test_errors_on_the_command_line_come_before_the_model(tmp_path, capsys, words, line):
    assert main(["generate", "--run", str(tmp_path), *words, PROMPT]) == 2
    assert line in capsys.readouterr().err
