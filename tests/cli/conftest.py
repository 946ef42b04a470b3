"""A place with a corpus and a finished run, for everything that calls the command line."""

import shutil
from contextlib import ExitStack

import pytest
from tests.support.place import TEXT, Place

from expertmesh.cli.main import main


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    (folder / "corpus.txt").write_text(TEXT)
    place = Place(folder, folder / "run", pytest.MonkeyPatch(), ExitStack())
    assert main(place.train()) == 0
    return folder


@pytest.fixture
def place(tmp_path, finished, monkeypatch):
    """Each mistake gets its own corpus and cache; the cache is shared through a copy, so that nothing is trained
    anew."""
    shutil.copy(finished / "corpus.txt", tmp_path)
    shutil.copytree(finished / "cache", tmp_path / "cache")
    with ExitStack() as stack:
        yield Place(tmp_path, finished / "run", monkeypatch, stack)
