"""`import expertmesh as em`: what it shows, and the example of every name runs."""

import doctest
import inspect
import pydoc
import random
import re
import shutil
from pathlib import Path

import pytest

import expertmesh as em

WORDS = ("alpha", "beta", "gamma", "to", "be", "or", "not", "that", "is", "the", "question")
RUN = "runs/text"
"""What the example of `train` trains, and others go on with; these may run in another process, and first."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory with a text, of which the examples speak."""
    place = tmp_path_factory.mktemp("python_api")
    draw = random.Random(0)
    lines = (" ".join(draw.choice(WORDS) for _ in range(9)) for _ in range(2000))
    (place / "corpus.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        patch.chdir(place)
        yield place


def run_example(name):
    text = inspect.getdoc(getattr(em, name))
    assert f"em.{name}" in text, "the example does not use it"
    test = doctest.DocTestParser().get_doctest(text, {"em": em}, name, None, 0)
    assert test.examples
    said = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


@pytest.mark.parametrize("name", em.__all__)
def test_the_example_of_a_name_runs(name, folder):
    if name == "train":
        shutil.rmtree("runs", ignore_errors=True)
    elif RUN in inspect.getdoc(getattr(em, name)) and not Path(RUN).exists():
        run_example("train")
    run_example(name)


def test_dir_shows_the_public_names_and_nothing_else():
    assert dir(em) == sorted(em.__all__)
    assert "MoELayer" in em.__doc__
    assert all(f"{name}" in em.__doc__ for name in em.__all__ if not name.endswith("Error"))


def test_help_describes_the_public_names_and_no_others():
    """Below the list of submodules, which pydoc adds to every package."""
    text = pydoc.plaintext.docmodule(em)
    parts = dict(re.findall(r"^([A-Z][A-Z ]+)\n(.*?)(?=^[A-Z]|\Z)", text, re.MULTILINE | re.DOTALL))
    functions = set(re.findall(r"^    (\w+)\(", parts["FUNCTIONS"], re.MULTILINE))
    classes = set(re.findall(r"^    class (\w+)\(", parts["CLASSES"], re.MULTILINE))
    assert functions | classes == set(em.__all__) - {"functional", "lora"}
    assert "DATA" not in parts


def test_no_submodule_takes_a_name():
    """Importing a submodule sets its name on the package; `functional` is the one that is meant."""
    import pkgutil

    modules = {module.name for module in pkgutil.iter_modules(em.__path__)}
    assert modules & set(em.__all__) == {"functional", "lora"}
