"""Numbers beyond what a machine or a type holds, and files of runs that are not what they should be: the rule and the
fix in one line."""

import pytest

from expertmesh.cli.main import main


def one_line(captured):
    lines = [x for x in captured.err.splitlines() if not x.startswith("warning:")]
    assert len(lines) == 1 and lines[0].startswith("error: "), captured.err
    assert ";" in lines[0] and "unexpected" not in lines[0]
    return lines[0]


def test_a_dry_run_of_what_has_no_room_shows_the_parts(place, capsys):
    assert main([*place.train("--model.dim", "1048576"), "--dry-run"]) == 0
    assert "TiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verb_name", "option"),
    [("train", "--train.micro-batch-size"), ("generate", "--batch-size"), ("report", "smaller")],
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
