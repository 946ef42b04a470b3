"""The words of the verbs that take a run: its folder is the first one, in any order with options."""

from typing import Annotated

import pytest
from tests.support.known_rows import known

from expertmesh.cli import parse
from expertmesh.cli.flags import parse_run_config
from expertmesh.cli.main import main
from expertmesh.cli.prog_name import Flags, prog_name
from expertmesh.config.fields import ModelFolder, Operation, Spelling
from expertmesh.errors import ConfigError


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    monkeypatch.chdir(tmp_path)


class GenerateVerb(Operation):
    """Continues a text.

    examples:
      expertmesh generate runs/demo PROMPT
    """

    run: ModelFolder
    prompt: Annotated[tuple[str, ...], Spelling("PROMPT", is_word=True, is_free=True)] = ()
    greedy: bool = False
    seed: int = 0


class ExportVerb(Operation):
    """Exports a run.

    examples:
      expertmesh export runs/demo
    """

    run: ModelFolder
    greedy: bool = False


def parsed(words, kind=GenerateVerb):
    return parse.parsed(kind, words)


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
    assert (found.run, list(found.prompt)) == (run, prompts)
    assert found.greedy == ("--greedy" in words.partition("-- ")[0])


@pytest.mark.parametrize(
    ("words", "kind", "says"),
    [
        (
            [],
            GenerateVerb,
            "no run given; write one: P generate runs/demo PROMPT (see P generate --help)",
        ),
        (
            ["--greedy"],
            ExportVerb,
            "no run given; write one: P export runs/demo (see P export --help)",
        ),
        (
            ["def main("],
            GenerateVerb,
            (
                "run def main(: does not exist, and the first word is the run: P generate runs/demo PROMPT; train one "
                "with: P train"
            ),
        ),
        (
            ["runs/file", "a"],
            GenerateVerb,
            "run runs/file: is no folder, and the first word is the run: ",
        ),
        (
            ["org/model", "a"],
            GenerateVerb,
            (
                "run org/model: does not exist, and the first word is the run: P generate runs/demo PROMPT; train one "
                "with: P train;"
                " if it is a model of the hub, download it first: hf download org/model"
            ),
        ),
        (
            ["a", "--run", "b"],
            ExportVerb,
            "two runs given, a and b; leave one out: P export runs/demo",
        ),
        *(
            (
                words,
                GenerateVerb,
                "two runs given, model and runs; leave one out, or write -- before",
            )
            for words in (
                ["model", "--run", "runs"],
                ["model", "--run-dir", "runs", "a"],
                ["--run", "runs", "a", "model"],
            )
        ),
        (["runs", "a"], ExportVerb, "unexpected word 'a'; see P export --help"),
        (["runs", "a", "--sede", "3"], GenerateVerb, "unknown option --sede; did you mean --seed?"),
        (
            ["runs", "--seed", "x"],
            GenerateVerb,
            "--seed x: must be a whole number; for example 0",
        ),
    ],
    ids=str,
)
def test_mistakes_about_the_run(words, kind, says):
    with pytest.raises(ConfigError) as caught:
        parsed(words, kind)
    assert Flags().spell(caught.value).replace(prog_name(), "P").startswith(says)


VERBS = [
    "generate RUN a",
    *known(["translate RUN --to de a", "classify RUN a.png"]),
    "report RUN",
    "export RUN --output out",
    "evaluate RUN --tasks quiz.yaml",
    "experts prune RUN --keep 1 --to new",
]


@pytest.mark.parametrize(
    "words",
    [
        *VERBS,
        *(words.replace("RUN", f"{option} RUN") for words in VERBS for option in ("--run", "--run-dir")),
    ],
)
def test_every_verb_takes_its_run_first(words, capsys):
    """The folder has no run in it, which is what each of them says."""
    assert main(words.replace("RUN", "runs").split()) == 2
    assert "runs: has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("runs runs", "runs: no run is below it"),
        ("runs --run runs", "runs: no run is below it"),
        ("runs --run runs model", "two folders given, model and runs; leave one out"),
        ("runs", "no folder given; write one: "),
        ("convert runs --to new", "runs: has no config.json"),
        ("convert --from runs --to new", "runs: has no config.json"),
        ("convert model --from runs --to new", "two folders given, model and runs; leave one out"),
        ("convert --to new", "no folder given; write one: "),
        ("experts join --run runs --run model --to new", "runs: has no config.json"),
        ("experts join runs --run model --to new", "runs: has no config.json"),
        ("experts join --run runs --to new", "experts join: got 1 runs; name two"),
    ],
)
def test_folders_of_other_verbs_are_words_or_options(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["serve", "convert --to new --from"])
def test_a_folder_of_adapters_is_not_taken_for_a_model(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems/adapter_config.json").write_text("{}")
    assert main([*verb.split(), "poems"]) == 2
    assert "run poems: holds adapters without their model; give the model" in capsys.readouterr().err
    assert main(["train", "poems"]) == 2
    assert "unknown recipe 'poems'; nor is it a folder with a model's config.json" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "number"), [("1e3", 1000), ("2.5E1", 25), ("1e+2", 100), ("12", 12)])
def test_whole_numbers_may_have_a_power_of_ten(text, number):
    assert parsed(["runs", "--seed", text]).seed == number
    parsed_run = parse_run_config(["gpt-moe-test", "--train.steps", text])
    assert parsed_run.config.train.steps == number


@pytest.mark.parametrize("text", ["1.5e0", "1e-3", "e3", "1e999", "inf"])
def test_other_numbers_are_not_whole(text):
    with pytest.raises(ConfigError, match="must be a whole number"):
        parsed(["runs", "--seed", text])
    with pytest.raises(ConfigError, match="train.steps"):
        parse_run_config(["gpt-moe-test", "--train.steps", text])
