"""Objects of the kernels for processors: compiled once, kept where only the user can write, never loaded from
elsewhere."""

import os
import shutil
import subprocess
import sys

import pytest
from tests.support.patience import PATIENCE_S

from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.build import BuildError, built
from expertmesh.kernels.cpu.instructions import (
    INSTRUCTION_SETS,
    VARIABLE,
    allowed_sets,
    flags_of_processor,
    sets_of,
)

PLAIN = INSTRUCTION_SETS["plain"]
COMPILER = """#!/bin/sh
case "$*" in *" -c "*) ;; *) echo once >> "{count}" ;; esac
for last; do :; done
echo object > "$last"
"""


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """A compiler that counts the objects it links; gives a function that returns how many there were."""
    count, script = tmp_path / "count", tmp_path / "compiler"
    script.write_text(COMPILER.format(count=count))
    script.chmod(0o755)
    monkeypatch.setenv("CC", f"{script} -pipe")
    return lambda: len(count.read_text().split()) if count.exists() else 0


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the objects."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "expertmesh" / "kernels"


def content(most_objects=3):
    with built(PLAIN, most_objects=most_objects) as path:
        return path.read_text(), path.parent


def test_an_object_is_compiled_once(compiler, cache):
    assert content() == content() == ("object\n", cache)
    assert compiler() == 1
    (found,) = cache.glob("*.so")
    assert [path.stat().st_mode & 0o777 for path in (cache, cache.parent, found)] == [0o700] * 3


def write_more(found):
    found.write_text("other\n")


def link(found):
    os.link(found, found.parent.parent / "link")


def point_elsewhere(found):
    elsewhere = found.parent.parent / "elsewhere.so"
    found.rename(elsewhere)
    found.symlink_to(elsewhere)


def open_to_all(found):
    found.chmod(0o666)


def give_away(found):
    os.chown(found, 12345, 12345)


NEEDS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")


@pytest.mark.parametrize(
    "change",
    [write_more, link, point_elsewhere, open_to_all, pytest.param(give_away, marks=NEEDS_ROOT)],
)
def test_an_object_that_another_may_have_written_is_compiled_again(compiler, cache, change):
    content()
    change(*cache.glob("*.so"))
    assert content() == ("object\n", cache)
    assert compiler() == 2
    assert content() == ("object\n", cache)
    assert compiler() == 2


def open_folder(cache):
    cache.chmod(0o755)


def open_parent(cache):
    cache.parent.chmod(0o777)


def move_folder(cache):
    cache.rename(cache.parent / "moved")
    cache.symlink_to(cache.parent / "moved")


def move_parent(cache):
    moved = cache.parent.parent / "moved"
    cache.parent.rename(moved)
    cache.parent.symlink_to(moved)
    moved.chmod(0o777)


def give_folder_away(cache):
    os.chown(cache, 12345, 12345)


def give_parent_away(cache):
    os.chown(cache.parent, 12345, 12345)


@pytest.mark.parametrize(
    "change",
    [
        open_folder,
        open_parent,
        move_folder,
        move_parent,
        pytest.param(give_folder_away, marks=NEEDS_ROOT),
        pytest.param(give_parent_away, marks=NEEDS_ROOT),
    ],
)
def test_a_folder_that_another_can_write_to_is_not_used(compiler, cache, change):
    """The object in it is another's: it is never what is loaded."""
    content()
    change(cache)
    for found in cache.glob("*.so"):
        found.write_text("other\n")
    text, folder = content()
    assert text == "object\n"
    assert folder != cache and not folder.exists()
    assert compiler() == 2


def test_a_folder_from_which_nothing_can_be_loaded_is_not_used(compiler, cache):
    content()
    with built(PLAIN, loads_from=lambda folder: folder != cache) as path:
        assert path.parent != cache
    assert compiler() == 2


def test_what_a_killed_compiler_left_is_removed(compiler, cache):
    content()
    (found,) = cache.glob("*.so")
    name, _, _ = found.stem.rpartition("-")
    found.unlink()
    (cache / f"{name}.abc" / "tmp").mkdir(parents=True)
    assert content() == ("object\n", cache)
    assert {path.name for path in cache.iterdir()} == {found.name, f"{name}.lock"}


WHERE = """
from expertmesh.kernels.cpu.build import built
from expertmesh.kernels.cpu.instructions import INSTRUCTION_SETS
with built(INSTRUCTION_SETS["plain"]) as path:
    print(path.parent.parent, oct(path.parent.stat().st_mode & 0o777))
"""


@pytest.mark.parametrize("home", ["/proc/nowhere", "{file}", "{file}/below"])
def test_without_a_folder_the_object_is_of_this_process_alone(compiler, tmp_path, home):
    (tmp_path / "file").write_text("")
    (places := tmp_path / "tmp").mkdir()
    where = {"XDG_CACHE_HOME": home.format(file=tmp_path / "file"), "TMPDIR": str(places)}
    done = subprocess.run(
        [sys.executable, "-c", WHERE],
        env=os.environ | where,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout.split() == [str(places), "0o700"], done.stderr
    assert list(places.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("no-such-compiler", "CC='no-such-compiler' is not there"),
        ("gcc '", "is no command"),
        ("false", "false fails: status 1"),
        ("true", "true fails: status 0"),
        ("sh -c 'echo first error: no >&2; exit 3'", "sh fails: first error: no"),
    ],
)
def test_a_compiler_that_does_not_compile_is_named(cache, monkeypatch, given, reason):
    monkeypatch.setenv("CC", given)
    with pytest.raises(BuildError, match=reason), built(PLAIN):
        pass


def test_without_a_compiler(cache, tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no C compiler \(cc, gcc, clang\)"), built(PLAIN):
        pass


ALL_AT_ONCE = """
from expertmesh.kernels.cpu.build import built
from expertmesh.kernels.cpu.instructions import INSTRUCTION_SETS
with built(INSTRUCTION_SETS["plain"]) as path:
    print(path.read_text(), end="")
"""


def test_processes_wait_for_the_one_that_compiles(compiler, cache):
    words = [sys.executable, "-c", ALL_AT_ONCE]
    started = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [one.communicate(timeout=PATIENCE_S)[0] for one in started] == ["object\n"] * 3
    assert compiler() == 1


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ("", ["plain"]),
        ("avx2", ["plain"]),
        ("avx2 fma", ["avx2", "plain"]),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", ["avx512", "avx2", "plain"]),
        (
            "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile",
            ["avx512_bf16", "avx512", "avx2", "plain"],
        ),
        (
            "avx2 fma avx512f avx512bw avx512vl avx512dq avx512_bf16 amx_tile amx_bf16",
            list(INSTRUCTION_SETS),
        ),
    ],
)
def test_instruction_sets_of_a_processor(flags, names):
    assert [one.name for one in sets_of(flags.split())] == names


def test_the_environment_names_a_lower_set(monkeypatch):
    own = [one.name for one in sets_of(flags_of_processor())]
    for name in own:
        monkeypatch.setenv(VARIABLE, name)
        assert [one.name for one in allowed_sets()] == own[own.index(name) :]
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ConfigError, match=f"{VARIABLE}='sse9': is no instruction set of this processor"):
        allowed_sets()


HOLDS = """
import sys
from expertmesh.kernels.cpu.build import built
from expertmesh.kernels.cpu.instructions import INSTRUCTION_SETS
with built(INSTRUCTION_SETS["plain"]) as path:
    print(path.name, flush=True)
    sys.stdin.readline()
    print(path.read_text(), end="", flush=True)
"""


def test_old_objects_are_removed_but_not_those_that_a_process_is_about_to_load(compiler, cache, monkeypatch):
    words = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        held = other.stdout.readline().strip()
        own = os.environ["CC"]
        for number in range(6):
            monkeypatch.setenv("CC", f"{own} -D{number}")
            content()
            os.utime(next(cache.glob(held)), (0, 0))  # the oldest
        assert (cache / held).exists() and len(list(cache.glob("*.so"))) == 4
        assert other.communicate("\n", timeout=PATIENCE_S)[0] == "object\n"
    (cache / "plain-123.so").write_text("of a compiler that was killed")
    os.utime(cache / "plain-123.so", (0, 0))
    monkeypatch.setenv("CC", f"{own} -D6")
    assert content()[1] == cache
    kept = list(cache.glob("*.so"))
    assert len(kept) == 3 and not (cache / held).exists()
    locks = {path.stem for path in cache.glob("*.lock")}
    assert locks == {path.stem.rpartition("-")[0] for path in kept}
    monkeypatch.setenv("CC", f"{own} -D5")
    before = compiler()
    assert content() == ("object\n", cache) and compiler() == before
    monkeypatch.setenv("CC", own)  # the one that was removed is compiled again
    assert content() == ("object\n", cache) and compiler() == before + 1


LOADS = """
import sys
import torch
from expertmesh.ops import native_linear
from expertmesh.ops.backend import cpu_kernels
x, w = torch.ones(3, 8), torch.ones(4, 8)
cpu_kernels()
print("loaded", flush=True)
sys.stdin.readline()
print(native_linear.linear(x, w, None).sum().item(), flush=True)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_process_that_has_loaded_an_object_keeps_it(cache, monkeypatch):
    monkeypatch.setenv(VARIABLE, "plain")
    words = [sys.executable, "-c", LOADS]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "loaded\n"
        monkeypatch.setenv("CC", "cc -g")
        (own,) = cache.glob("plain-*.so")
        with built(PLAIN, most_objects=1) as path:
            assert list(cache.glob("*.so")) == [path] != [own]
        assert float(other.communicate("\n", timeout=PATIENCE_S)[0]) == 96
