"""Wheels that bring the kernels compiled: their files, what they need, and that no compiler is asked for."""

import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest
from tests.support.tools import tool

from expertmesh.kernels.cpu import build
from expertmesh.kernels.cpu.instructions import INSTRUCTION_SETS

ROOT = Path(__file__).parents[2]
PLAIN = INSTRUCTION_SETS["plain"]
PURE = {
    "expertmesh/a.py": "a = 1\n",
    "expertmesh-0.1.0.dist-info/WHEEL": "Root-Is-Purelib: true\nTag: py3-none-any\n",
    "expertmesh-0.1.0.dist-info/RECORD": "expertmesh/a.py,,\n",
}


@pytest.fixture
def release():
    return tool("release")


def test_a_wheel_for_a_platform_is_the_other_one_with_objects(release, tmp_path):
    pure = tmp_path / "expertmesh-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(pure, "w") as out:
        for name, text in PURE.items():
            out.writestr(name, text)
    extra = {f"{release.FOLDER}/plain-0.so": b"object"}
    with zipfile.ZipFile(release.with_objects(pure, extra, tmp_path)) as made:
        assert Path(made.filename).name == "expertmesh-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
        assert {*made.namelist()} == {*PURE, *extra}
        about = made.read("expertmesh-0.1.0.dist-info/WHEEL").decode().splitlines()
        assert about == ["Root-Is-Purelib: false", f"Tag: {release.TAG}"]
        record = made.read("expertmesh-0.1.0.dist-info/RECORD").decode().splitlines()
        for line in record[:-1]:
            name, digest, size = line.split(",")
            data = made.read(name)
            assert int(size) == len(data) and digest == f"sha256={release._hash(data)}"
        assert len(record) == len(PURE) + len(extra)


@pytest.mark.parametrize(
    ("needed", "said"),
    [
        (b"\0libgomp.so.1\0GLIBC_2.2.5\0", "libgomp.so.1"),
        (b"\0libm.so.6\0", "libm.so.6"),
        (b"\0libc.so.6\0libgomp.so.1\0", "libgomp.so.1"),
        (b"\0libc.so.6\0GLIBC_2.38\0", "2, 38"),
    ],
)
def test_an_object_that_needs_more_than_the_c_library_is_in_no_release(release, needed, said):
    release.check_needs("fine", b"\0libc.so.6\0GLIBC_2.2.5\0GLIBC_2.28\0")
    with pytest.raises(SystemExit, match=said):
        release.check_needs("plain", needed)


def test_what_is_shipped_needs_no_compiler_and_no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with (
        pytest.raises(build.BuildError, match="no C compiler"),
        build.built(PLAIN, shipped=tmp_path),
    ):
        pass
    (shipped := tmp_path / build.shipped_name(PLAIN)).write_bytes(b"object")
    with build.built(PLAIN, shipped=tmp_path) as path:
        assert path == shipped
    monkeypatch.setenv("CC", "no-such-compiler")  # asked for: what is shipped is another compiler's
    with (
        pytest.raises(build.BuildError, match="no-such-compiler"),
        build.built(PLAIN, shipped=tmp_path),
    ):
        pass
    assert not (tmp_path / "cache").exists()


def test_changed_sources_have_no_shipped_object(tmp_path):
    copy = tmp_path / "sources"
    shutil.copytree(build.SOURCES, copy)
    name = build.shipped_name(PLAIN)
    assert build.shipped_name(PLAIN, copy) == name
    (copy / "experts.c").write_text("int other;\n")
    assert build.shipped_name(PLAIN, copy) != name


def test_every_object_needs_the_c_library_alone(release, tmp_path):
    try:
        compiler = build.compiler_command()
    except build.BuildError:
        pytest.skip("no C compiler")
    for one in (PLAIN, INSTRUCTION_SETS["avx2"]):
        release.check_needs(one.name, build.compiled(compiler, one, tmp_path).read_bytes())


def test_the_sdist_has_the_sources(tmp_path):
    """As setuptools takes them: by the package's data, of which every kind of file is named."""
    listed = subprocess.run(
        ["git", "ls-files", "src/expertmesh/kernels/cpu"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split() or [str(path) for path in build.SOURCES.iterdir()]
    kinds = {Path(name).suffix for name in listed if "." in name} - {".py", ""}
    named = (ROOT / "pyproject.toml").read_text()
    assert kinds - {".so"} == {".c", ".h"}
    assert all(f'"kernels/cpu/*{kind}"' in named for kind in kinds)
