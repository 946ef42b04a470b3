"""examples/chat/: the whole way in miniature, stopped and started again, and its commands in full size."""

import importlib.util
import json
import runpy
import sys
from pathlib import Path

import httpx2
import pytest
from tests.support.serving import served

import expertmesh as em
from expertmesh.cli.main import main

CHAT = Path(__file__).parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def way():
    """The program, whose commands run in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CHAT))
        spec = importlib.util.spec_from_file_location("way", CHAT / "way.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.run = in_process
        yield module
        sys.modules.pop("report", None)


def in_process(words):
    """Exit code of a command."""
    if words[0] == "expertmesh":
        return main(words[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        runpy.run_path(words[1], run_name="__main__")
    return 0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.chdir(folder)
        yield folder


def called(way, *words):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["way.py", "runs/chat", "--base", "runs/text", *words])
        return way.main()


@pytest.fixture(scope="module")
def first(way, place):
    """The way in miniature, which is stopped in its fourth stage and started again: commands that ran, each time."""
    ran = [[], []]

    def stopped(words):
        ran[0].append(words)
        return in_process(words) if len(ran[0]) < 4 else 130

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(way, "run", stopped)
        assert called(way, "--tiny") == 130
        patch.setattr(way, "run", lambda words: ran[1].append(words) or in_process(words))
        assert called(way, "--tiny") == 0
    return ran


def test_a_stopped_way_goes_on_and_a_finished_one_does_nothing(way, first, capsys):
    assert [len(words) for words in first] == [4, len(way.STAGES) - 3]
    assert first[0][-1] == first[1][0]
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(way, "run")
        assert called(way, "--tiny") == 0
    said = capsys.readouterr().out
    assert said.count("done: ") == len(way.STAGES) and "expertmesh serve runs/chat/int8" in said


def test_the_report_has_every_stage_and_the_measures_of_each_model(way, first, place):
    text = (place / "runs/chat/report.md").read_text()
    found = json.loads((place / "runs/chat/measured.json").read_text())
    assert set(found) == {"text", "talk", "preferred", "rewarded", "int8"}
    for name in ("text", "talk", "preferred", "rewarded"):
        assert f"\n| {name} | " in text
    for one in found.values():
        assert f"{one['tasks']['loss']:.3f} | {one['chats']['better']:.3f}" in text
    assert (place / "runs/chat/report.html").stat().st_size > 0


def test_a_question_is_in_one_file_and_a_worse_answer_is_broken_off(first, place):
    files = {
        path.stem: list(map(json.loads, path.read_text().splitlines()))
        for path in (place / "runs/chat/data").glob("*.jsonl")
    }
    asked = [one.get("messages", one.get("prompt"))[0]["content"] for records in files.values() for one in records]
    assert set(files) == {"chats", "pairs", "prompts", "heldout"} and all(files.values())
    assert len(asked) == len(set(asked))
    for one in files["pairs"]:
        better, worse = (one[key][0]["content"] for key in ("chosen", "rejected"))
        assert better.startswith(worse) and 0 < len(worse) < len(better)


def test_the_model_is_known_to_converse(first, place):
    assert all(em.Engine(f"runs/chat/{name}").text.can_chat for name in ("talk", "rewarded"))
    with served(place / "runs/chat/int8") as server:
        assert "completions only" not in server.said.read_text()
        talk = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}
        answer = httpx2.post(f"{server.address}/v1/chat/completions", json=talk)
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]


def test_the_commands_in_full_size_are_understood(way, first, capsys):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["way.py", "runs/chat", "--base", "runs/text"])
        lines = way.commands(way.parsed())
    assert set(lines) == set(way.STAGES)
    for words in lines.values():
        if words[1] == "train" and words[2] != "gpt-moe-demo":
            words[words.index("--train.run-dir") + 1] = "runs/other"
            assert main([*words[1:], "--dry-run"]) == 0
            capsys.readouterr()


@pytest.mark.parametrize("words", [["--nonsense"], ["--seed", "x"], ["a", "b"]])
def test_wrong_words_are_refused_before_work(words, way, place, capsys):
    with pytest.raises(SystemExit, match="2"):
        called(way, *words)
    assert "error: " in capsys.readouterr().err
