"""A model's id of the hub where a folder is meant: every verb and door says how to download it."""

import pytest

import expertmesh as em
from expertmesh.cli.main import main
from expertmesh.config.hub_id import how_to_fetch
from expertmesh.errors import ConfigError
from expertmesh.integrations.hub import convert, load_pretrained

ID = "Qwen/Qwen3-30B-A3B"
FETCH = f"hf download {ID} --local-dir models/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("given", "is_id"),
    [
        (ID, True),
        ("a/b.c-d_e", True),
        ("here/gone", False),  # there is a folder "here"
        ("gone", False),
        ("a/b/c", False),
        ("./a", False),
        ("../a", False),
        ("/a/b", False),
        ("~/a", False),
        ("", False),
    ],
)
def test_what_looks_like_an_id(tmp_path, monkeypatch, given, is_id):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    assert bool(how_to_fetch(given)) is is_id


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "--from", ID, "--to", "x"],
        ["generate", ID, "text"],
        ["generate", "--run", ID, "text"],
        ["report", "--run", ID],
        ["export", ID, "--output", "x.safetensors"],
        ["train", "gpt-moe-test", "--train.init-from", ID, "--data.path", "t.txt"],
    ],
)
def test_verbs_say_how_to_download(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.txt").write_text("some text\n" * 9)
    assert main(words) != 0
    found = capsys.readouterr().err
    assert found.rstrip().endswith(FETCH), "its folder opens as it is, without convert"
    assert {path.name for path in tmp_path.iterdir()} == {"t.txt"}


@pytest.mark.parametrize("door", [em.load, load_pretrained, lambda name: convert(name, "x")])
def test_doors_say_how_to_download(tmp_path, monkeypatch, door):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=FETCH):
        door(ID)
