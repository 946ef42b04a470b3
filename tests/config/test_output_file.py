"""Files for answers: refused before the work where nothing can be written, complete or not there afterwards."""

import errno
import os
from pathlib import Path

import pytest

from expertmesh.config.output_file import complete, growing, naming, output_file, write_whole
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
        ("", "must not be empty"),
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
        (OSError(errno.EISDIR, "a folder", "/p/.new.partial", None, "/p/new"), "new"),
        (OSError(errno.EACCES, "closed", "source"), "source"),
        (OSError("another one"), None),
    ],
    ids=str,
)
def test_an_error_of_writing_names_what_the_user_knows(error, named):
    with pytest.raises(type(error)) as caught, naming(Path("new"), Path("/p/.new.partial")):
        raise error
    assert (caught.value.errno, caught.value.filename) == (error.errno, named)


def failing(path, error):
    """What is left of two texts and this error."""
    with pytest.raises(type(error)) as caught, growing(path) as file:
        file.write("one\n")
        file.write("two\n")
        raise error
    assert caught.value is error, "as it was raised"
    return file.rest


def test_texts_before_a_failure_never_take_the_place_of_others(folder):
    path, error = folder / "text", OSError(errno.ENOSPC, "full")
    (folder / "text.part2").mkdir()
    (folder / "text.part3").symlink_to("nowhere")
    before = sorted(folder.iterdir())
    rests = [failing(path, error) for _ in range(3)]
    assert rests == [folder / f"text.part{end}" for end in ("", 4, 5)]
    assert {rest.read_text() for rest in rests} == {"one\ntwo\n"}
    assert sorted(folder.iterdir()) == sorted([*before, *rests])
    assert path.read_text() == "mine" and error.filename is None


class Unmovable(type(Path())):
    """A path that nothing is renamed to or from."""

    def rename(self, *_):
        raise PermissionError(errno.EACCES, "no")


def test_texts_stay_where_they_are_if_they_cannot_be_renamed(folder):
    rest = failing(Unmovable(folder / "text"), KeyboardInterrupt())
    assert rest in folder.iterdir() and rest.read_text() == "one\ntwo\n"


def test_finished_texts_outlive_a_failing_last_rename(folder):
    path = folder / "new"
    with pytest.raises(OSError) as caught, growing(path) as file:
        file.write("one\n")
        path.mkdir()
    assert caught.value.filename == str(path)
    assert file.count == 1 and file.rest == folder / "new.part"
    assert file.rest.read_text() == "one\n" and list(path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), OSError(errno.EIO, "bad")])
def test_half_a_text_is_removed(folder, error):
    class Breaking:
        """A file that takes a part of the second text."""

        def __init__(self, file):
            self._file, self._sizes = file, [4, 2]
            self.truncate = file.truncate

        def write(self, data):
            if not self._sizes:
                raise error
            return self._file.write(data[: self._sizes.pop(0)])

    with pytest.raises(type(error)) as caught, growing(folder / "new") as file:
        file._file = Breaking(file._file)
        file.write("one\n")
        file.write("two\n")
    assert (file.count, file.rest.read_text()) == (1, "one\n")
    assert getattr(caught.value, "filename", None) in (None, str(folder / "new"))
