"""The words of the verbs that take a run: its folder is the first one, in any order with options."""

import pytest

from expertmesh.cli.flags import OptionParser
from expertmesh.cli.main import main
from expertmesh.cli.prog_name import Flags, prog_name
from expertmesh.errors import ConfigError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)


def parsed(words, others="prompt"):
    parser = OptionParser(prog="expertmesh generate")
    parser.add_run(others, **({"metavar": "PROMPT"} if others else {}))
    parser.add_argument("--greedy", action="store_true")
    parser.add_argument("--seed", type=int)
    return parser.parse_args(words)


@pytest.mark.parametrize(
    ("words", "run", "prompts"),
    [
        ("runs a b", "runs", ["a", "b"]),
        ("runs --greedy a --seed 3 b", "runs", ["a", "b"]),
        ("--seed 3 runs a", "runs", ["a"]),
        ("--run runs a b", "runs", ["a", "b"]),
        ("--run-dir runs a b", "runs", ["a", "b"]),
        ("a --run-dir runs b", "runs", ["a", "b"]),
        ("a --run=runs", "runs", ["a"]),
        ("--run runs runs", "runs", ["runs"]),  # with the option every word is a prompt
        ("--run gone a", "gone", ["a"]),  # what opens it says that it is not there
        ("runs", "runs", []),
        ("runs -", "runs", ["-"]),
        ("runs a -- -x --greedy", "runs", ["a", "-x", "--greedy"]),
        ("-- runs -x", "runs", ["-x"]),
        ("--run runs -- -x", "runs", ["-x"]),
        ("runs a -- --", "runs", ["a", "--"]),
        ("--run runs -- model", "runs", ["model"]),
        ("runs model", "runs", ["model"]),
    ],
)
def test_the_run_is_the_first_word(words, run, prompts):
    found = parsed(words.split())
    assert (found.run, found.prompt) == (run, prompts)
    assert found.greedy == ("--greedy" in words.partition("-- ")[0])


@pytest.mark.parametrize(
    ("words", "others", "says"),
    [
        (
            [],
            "prompt",
            "no run given; write one: P generate runs/demo PROMPT ... (see P generate --help)",
        ),
        (["--greedy"], "", "no run given; write one: P generate runs/demo (see P generate --help)"),
        (
            ["def main("],
            "prompt",
            "run def main(: does not exist, and the first word is the run: P generate runs/demo PROMPT ...; train one with: P train",
        ),
        (
            ["runs/file", "a"],
            "prompt",
            "run runs/file: is no folder, and the first word is the run: ",
        ),
        (
            ["org/model", "a"],
            "prompt",
            (
                "run org/model: does not exist, and the first word is the run: P generate runs/demo PROMPT ...; train one with: P train;"
                " if it is a model of the hub, download it first: hf download org/model"
            ),
        ),
        (["a", "--run", "b"], "", "two runs given, a and b; write one: P generate runs/demo"),
        *(
            (words, "prompt", "two runs given, model and runs; leave one out, or write -- before")
            for words in (
                ["model", "--run", "runs"],
                ["model", "--run-dir", "runs", "a"],
                ["--run", "runs", "a", "model"],
            )
        ),
        (["runs", "a"], "", "unrecognized arguments: a; see P generate --help"),
        (["runs", "a", "--sede", "3"], "prompt", "unknown option --sede; did you mean --seed?"),
        (
            ["runs", "--seed", "x"],
            "prompt",
            "argument --seed: invalid int value: 'x'; see P generate --help",
        ),
    ],
    ids=str,
)
def test_mistakes_about_the_run(words, others, says):
    with pytest.raises(ConfigError) as caught:
        parsed(words, others)
    assert Flags().spell(caught.value).replace(prog_name(), "P").startswith(says)


VERBS = [
    "generate RUN a",
    "translate RUN --to de a",
    "classify RUN a.png",
    "report RUN",
    "export RUN --output out",
    "evaluate RUN --tasks quiz.yaml",
]


@pytest.mark.parametrize(
    "words",
    [
        "experts prune RUN --keep 1 --to new",
        *VERBS,
        *(
            words.replace("RUN", f"{option} RUN")
            for words in VERBS
            for option in ("--run", "--run-dir")
        ),
    ],
)
def test_every_verb_takes_its_run_first(words, capsys):
    """The folder has no run in it, which is what each of them says."""
    assert main(words.replace("RUN", "runs").split()) == 2
    assert "runs: has no config.json" in capsys.readouterr().err
