"""Numbers beyond what a machine or a type holds, and files of runs that are not what they should be: the rule and the fix in one line."""

import json
import shutil

import pytest
from tests.support.mistakes import reseal

from expertmesh.cli.main import main

HUGE = "9" * 20
NUMBERS = {
    "vocabulary": (["--model.vocab-size", "99999999999999"], "must be less than 2.14748e+09"),
    "vocabulary of 20 digits": (["--model.vocab-size", HUGE], "--model.vocab-size"),
    "layers": (["--model.num-layers", "100000000"], "must be at most 100000"),
    "width": (["--model.dim", "1048576"], "too large for memory"),
    "hidden size": (["--model.moe.hidden-dim", "9999999999"], "too large for memory"),
    "hidden size of 20 digits": (["--model.moe.hidden-dim", HUGE], "64 bits"),
    "experts": (["--model.moe.num-experts", "100000000"], "too large for memory"),
    "seed": (["--train.seed", str(2**64)], "64 bits"),
    "seed of 30 digits": (["--train.seed", "9" * 30], "64 bits"),
    "capacity factor": (["--model.moe.capacity-factor", "1e308"], "must be at most 1e+06"),
    "evaluation's factor": (["--model.moe.eval-capacity-factor", "1e300"], "at most 1e+06"),
    "factor's bound": (["--model.moe.max-capacity-factor", "1e7"], "at most 1e+06"),
    "least capacity": (
        ["--model.moe.capacity-factor", "1", "--model.moe.min-capacity", HUGE],
        "--model.moe.min-capacity",
    ),
    "batch": (["--train.batch-size", HUGE], "64 bits"),
    "batch beyond memory": (["--train.batch-size", "1000000000"], "lower --train.micro-batch-size"),
    "evaluation": (["--train.eval-batches", HUGE], "64 bits"),
    "threads": (["--parallel.num-threads", "1000000"], "cores; use at most"),
}


def one_line(captured):
    lines = [x for x in captured.err.splitlines() if not x.startswith("warning:")]
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    assert ";" in lines[0] and "unexpected" not in lines[0]
    return lines[0]


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beyond_the_machine(place, capfd, name):
    words, text = NUMBERS[name]
    assert main(place.train(*words)) == 2
    assert text in one_line(capfd.readouterr())
    assert not (place.folder / "run" / "config.json").exists()


def test_a_dry_run_of_what_has_no_room_shows_the_parts(place, capsys):
    assert main([*place.train("--model.dim", "1048576"), "--dry-run"]) == 0
    assert "TiB" in capsys.readouterr().out


def change_state(folder, name, value):
    """Another value in state.json, with its checksum."""
    for file in folder.glob("checkpoints/*/state.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
        reseal(file.parent)


@pytest.mark.parametrize(
    ("verb", "name", "value"),
    [
        ("train", "progress", None),
        ("train", "progress", [3]),
        ("train", "progress", {"step": "x"}),
        ("train", "config", None),
        ("train", "data_key", 3),
        ("train", "scaler", None),
        ("train", "step", "2"),
        ("export", "config", None),
        ("export", "step", "2"),
    ],
)
def test_a_checkpoint_without_its_values(place, capfd, verb, name, value):
    folder = place.with_run()
    change_state(folder, name, value)
    words = place.train("--train.resume", "auto", "--train.steps", "3")
    if verb == "export":
        words = ["export", str(folder), "--output", place.path("out.safetensors")]
    assert main(words) == 1
    line = one_line(capfd.readouterr())
    assert f"state.json: {'progress.step' if value == {'step': 'x'} else 'has no usable'}" in line
    assert name in line and "choose another" in line


@pytest.mark.parametrize("verb", ["generate", "report"])
def test_the_tokenizer_of_another_run(place, capfd, verb):
    folder = place.with_run()
    assert main(place.train("--model.vocab-size", "900", "--train.steps", "1", run="other")) == 0
    capfd.readouterr()
    shutil.copy(place.path("other/tokenizer.json"), folder)
    words = place.generate() if verb == "generate" else ["report", str(folder)]
    assert main(words) == 1
    assert "tokens and the model 512; it is of another run" in one_line(capfd.readouterr())


@pytest.mark.parametrize("text", ["1e-320", "1e-30", "0"])
def test_a_temperature_near_nothing_is_greedy(place, capfd, text):
    place.with_run()
    answers = []
    for words in (["--temperature", text], ["--greedy"]):
        assert main(place.generate(*words, "--max-tokens", "5")) == 0
        answers.append(capfd.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("verb_name", "option"),
    [("train", "--train.micro-batch-size"), ("translate", "--batch-size"), ("report", "smaller")],
)
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "this machine is out of memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: x"), "machine"),
        (
            type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried 2 GiB. G"),
            "GPU",
        ),
    ],
)
def test_out_of_memory_has_a_fix_of_the_verb(monkeypatch, capfd, error, words, verb_name, option):
    from expertmesh.cli import main as front

    def verb(argv):
        raise error

    monkeypatch.setitem(front.VERBS, verb_name, (verb, ""))
    assert main([verb_name]) == 1
    line = one_line(capfd.readouterr())
    assert words in line and option in line
    assert ("--train." in line) == (verb_name == "train")
