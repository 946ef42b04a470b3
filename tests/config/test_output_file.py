"""Files for answers: refused before the work where nothing can be written, complete or not there afterwards."""

import errno
import os
from pathlib import Path

import pytest

from expertmesh.config.output_file import complete, naming, output_file, write_whole
from expertmesh.errors import ConfigError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("mine")
    (tmp_path / "link").symlink_to("text")
    (tmp_path / "inside").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "to pipe").symlink_to("pipe")
    (tmp_path / "to nowhere").symlink_to("gone/file")
    return tmp_path


@pytest.mark.parametrize(
    "name, rule",
    [
        ("inside", "is no regular file"),
        ("pipe", "is no regular file"),
        ("to pipe", "is no regular file"),
        ("/dev/null", "is no regular file"),
        ("-", "is no regular file"),
        ("", "is no regular file"),
        ("no/file", "there is no folder no"),
        ("text/file", "there is no folder text"),
        ("to nowhere", "there is no folder .*gone"),
        ("link", "is the file text, which is read"),
        ("./text", "is the file text, which is read"),
        ("~nosuchuser/x", "there is no such user"),
    ],
)
def test_where_nothing_can_be_written(folder, name, rule):
    with pytest.raises(ConfigError, match=rule) as error:
        output_file("output", name, read=[None, "gone", "text"])
    assert ";" in str(error.value) and "\n" not in str(error.value)


def test_it_is_written_whole_and_a_link_stays_one(folder):
    path = output_file("output", "link", read=["new"])
    write_whole(path, "für Elise, 你好")
    assert path.is_symlink() and (folder / "text").read_bytes() == "für Elise, 你好".encode()
    write_whole(output_file("output", "new"), "x")
    assert (folder / "new").read_text() == "x"


def test_what_fails_leaves_all_as_it_was(folder):
    before = sorted(folder.iterdir())
    with pytest.raises(ZeroDivisionError), complete(folder / "text") as partial:
        partial.write_text(str(1 // 0))
    with pytest.raises(UnicodeEncodeError):
        write_whole(folder / "text", "half \udcff")
    assert sorted(folder.iterdir()) == before and (folder / "text").read_text() == "mine"


@pytest.mark.parametrize(
    "error, named",
    [
        (OSError(errno.ENOSPC, "full"), "new"),
        (OSError(errno.ENOSPC, "full", "/p/.new.partial/a"), "new"),
        (OSError(errno.ENOSPC, "full", "source", None, "/p/.new.partial/a"), "new"),
        (OSError(errno.EACCES, "closed", "source"), "source"),
        (OSError("another one"), None),
    ],
    ids=str,
)
def test_an_error_of_writing_names_what_the_user_knows(error, named):
    with pytest.raises(type(error)) as caught, naming(Path("new"), Path("/p/.new.partial")):
        raise error
    assert (caught.value.errno, caught.value.filename) == (error.errno, named)
