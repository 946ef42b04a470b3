"""Build what a release has: the sdist, a wheel for any platform, and one for Linux on x86-64 with the kernels compiled.

    python tools/release.py dist

Each of the three is then installed into an empty environment, and trains `gpt-moe-test` there in an empty folder.

The wheels differ in `expertmesh/kernels/cpu/objects`: one object per instruction set, of which a process loads the
best. An object needs the C library alone, no newer than `GLIBC`; the OpenMP runtime is torch's, found at run time. The
wheel for any platform compiles its kernels at first use where there is a C compiler.
"""

import base64
import hashlib
import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
PARTS = ("src", "pyproject.toml", "README.md", "LICENSE")
GLIBC = (2, 28)
TAG = f"py3-none-manylinux_{GLIBC[0]}_{GLIBC[1]}_x86_64"
FOLDER = "expertmesh/kernels/cpu/objects"
_STAMP = (1980, 1, 1, 0, 0, 0)


def objects(folder: Path) -> dict[str, bytes]:
    """Compile the kernels for every instruction set; content by name in the wheel.

    Raises:
        SystemExit: this is another platform, or an object needs more than the C library that the tag promises.
    """
    sys.path.insert(0, str(ROOT / "src"))
    build = importlib.import_module("expertmesh.kernels.cpu.build")
    sets = importlib.import_module("expertmesh.kernels.cpu.instructions").INSTRUCTION_SETS
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise SystemExit(f"a wheel for {TAG} is built on Linux on x86-64")
    found = {}
    for one in sets.values():
        content = build.compiled(build.compiler_command(), one, folder).read_bytes()
        check_needs(one.name, content)
        found[f"{FOLDER}/{build.shipped_name(one)}"] = content
    return found


def check_needs(name: str, content: bytes) -> None:
    """Refuse an object that needs another library than the C library, or a newer one than `GLIBC`."""
    versions = {tuple(map(int, v.split(b"."))) for v in re.findall(rb"GLIBC_([\d.]+)(?=\0)", content)}
    libraries = {*re.findall(rb"\0(lib[\w+-]+\.so[\w.]*)(?=\0)", content)} - {b"libc.so.6"}
    if libraries or max(versions, default=(0,)) > GLIBC:
        raise SystemExit(f"the object {name} needs {sorted(libraries)}, GLIBC {sorted(versions)}")


def with_objects(wheel: Path, extra: dict[str, bytes], folder: Path) -> Path:
    """Write a wheel for `TAG` that has the content of another one, and objects."""
    stem = wheel.name.removesuffix("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as source:
        content = {name: source.read(name) for name in source.namelist()} | extra
    info = f"{stem}.dist-info"
    text = content[f"{info}/WHEEL"].decode()
    text = text.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    content[f"{info}/WHEEL"] = text.replace("Tag: py3-none-any", f"Tag: {TAG}").encode()
    del content[f"{info}/RECORD"]
    lines = [f"{name},sha256={_hash(data)},{len(data)}" for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    target = folder / f"{stem}-{TAG}.whl"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
        for name, data in content.items():
            entry = zipfile.ZipInfo(name, _STAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            out.writestr(entry, data)
    return target


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def try_out(archive: Path, folder: Path) -> None:
    """Install a wheel or an sdist into an empty environment, and train with it in an empty folder.

    Dependencies are those of the interpreter that runs this: only the archive is installed.

    Raises:
        SystemExit: it does not install, is not what is imported, or does not train.
    """
    place, work = folder / "environment", folder / "work"
    work.mkdir(parents=True)
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    purelib = "import sysconfig; print(sysconfig.get_path('purelib'))"
    own = Path(
        subprocess.run([python, "-c", purelib], check=True, capture_output=True, text=True, env=env).stdout.strip()
    )
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    install = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    where = "import expertmesh; print(expertmesh.__file__)"
    train = [
        "-m",
        "expertmesh",
        "train",
        "gpt-moe-test",
        "--train.run-dir",
        "run",
        "--train.device",
        "cpu",
    ]
    for words in ([*install, str(archive)], ["-c", where], train):
        done = subprocess.run([python, *words], cwd=work, env=env, capture_output=True, text=True)
        is_foreign = words[-1] == where and not done.stdout.startswith(str(own))
        if done.returncode or is_foreign:
            raise SystemExit(f"{archive.name}: {words}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    print(f"{archive.name}: installed, and trained: {done.stdout.splitlines()[0]}", flush=True)


def main(words: list[str]) -> None:
    """Build everything into the folder that is named, and try it out."""
    (name,) = words
    out = Path(name).absolute()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place) / "tree"  # builds leave folders behind
        tree.mkdir()
        for part in PARTS:
            source, ignore = ROOT / part, shutil.ignore_patterns("__pycache__", "*.egg-info")
            if source.is_dir():
                shutil.copytree(source, tree / part, ignore=ignore)
            else:
                shutil.copy2(source, tree / part)
        for kind in ("sdist", "wheel"):
            code = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
            subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, stdout=-3)
        wheel = max(out.glob("*-py3-none-any.whl"), key=os.path.getmtime)
        sdist = max(out.glob("*.tar.gz"), key=os.path.getmtime)
        both = wheel, with_objects(wheel, objects(Path(place)), out)
        for number, archive in enumerate((sdist, *both)):
            try_out(archive, Path(place) / f"trial{number}")


if __name__ == "__main__":
    main(sys.argv[1:] or ["dist"])
