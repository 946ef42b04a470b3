"""Finds the kernels' object: shipped beside the sources, or compiled at first use and kept in the user's cache folder.

An object is loaded only if nobody else can have written it: folder and file belong to the user, no other may write to
them or to a folder above, none of them is a link, and the file's name holds the hash of its content. Otherwise the
kernels are compiled for this process alone, in a folder of its own that is removed at once.
"""

import contextlib
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from expertmesh.config.base import user_cache_dir
from expertmesh.config.file_lock import exclusive, shared
from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.instructions import InstructionSet

SOURCES = Path(__file__).parent
SHIPPED = SOURCES / "objects"
"""Folder of the objects that a wheel for one platform brings; absent elsewhere."""
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-trapping-math",
)
"""Options of the compiler for every instruction set. Sums keep their order, and only what is written as one is
fused."""
_PATIENCE_S = 300
MOST_OBJECTS = 16
"""Objects that stay in the cache: all instruction sets of the newest three sources."""


class BuildError(Exception):
    """The kernels cannot be compiled here; the message is the reason, in one line."""


def can_be_loaded_from(folder: Path) -> bool:
    """Whether the file system of a folder lets objects be loaded."""
    return not os.statvfs(folder).f_flag & os.ST_NOEXEC


@contextmanager
def built(
    instructions: InstructionSet,
    *,
    shipped: Path = SHIPPED,
    most_objects: int = MOST_OBJECTS,
    loads_from: Callable[[Path], bool] = can_be_loaded_from,
) -> Iterator[Path]:
    """Path of the object for an instruction set: shipped, cached, or compiled now; valid inside the context.

    Args:
        shipped: folder of shipped objects, which are not read if CC names a compiler.
        loads_from: whether objects of a folder can be loaded.
    """
    ready = shipped / shipped_name(instructions)
    if not os.environ.get("CC") and ready.is_file():
        yield ready
        return
    with contextlib.ExitStack() as stack:
        compiler, found = compiler_command(), None
        # no home, a full disk, a file system without locks
        with contextlib.suppress(OSError, ConfigError, BuildError):
            found = _cached(compiler, instructions, user_cache_dir() / "kernels", stack, most_objects, loads_from)
        if found is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expertmesh-")))
            found = compiled(compiler, instructions, folder)
        yield found


def shipped_name(instructions: InstructionSet, sources: Path = SOURCES) -> str:
    """Name of a shipped object: changed sources have no object of this name."""
    digest = _digest(sources, *OPTIONS, *instructions.options, platform.machine())
    return f"{instructions.name}-{digest}.so"


def compiler_command() -> list[str]:
    """Command of the compiler: CC, else the first of `COMPILERS` that exists."""
    given = os.environ.get("CC", "")
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise BuildError(f"CC={given!r} is no command: {error}") from None
    if command:
        if shutil.which(command[0]) is None:
            raise BuildError(f"CC={given!r} is not there")
        return command
    for name in COMPILERS:
        if shutil.which(name) is not None:
            return [name]
    raise BuildError(f"there is no C compiler ({', '.join(COMPILERS)})")


def compiled(compiler: list[str], instructions: InstructionSet, folder: Path) -> Path:
    """Compile into a new file of the folder, and return its path."""
    out = folder / f"{instructions.name}-{os.getpid()}.so"
    words = [*compiler, *OPTIONS, *instructions.options]
    sources = sorted(SOURCES.glob("*.c"))
    with tempfile.TemporaryDirectory(dir=folder) as parts, ThreadPoolExecutor() as pool:
        objects = [f"{parts}/{source.stem}.o" for source in sources]
        # at once: somebody waits for the first token
        jobs = [
            pool.submit(_run, [*words, "-c", str(source), "-o", made])
            for source, made in zip(sources, objects, strict=True)
        ]
        for job in jobs:
            job.result()
        _run([*words, *objects, "-o", str(out)])
    return out


def _run(words: list[str]) -> None:
    """Run the compiler, whose last word is the file it makes."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            errors="replace",
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{words[0]} does not run: {error}") from error
    if done.returncode or not Path(words[-1]).is_file():
        errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        Path(words[-1]).unlink(missing_ok=True)
        raise BuildError(f"{words[0]} fails: {errors[0].strip() if errors else f'status {done.returncode}'}")


def _key(compiler: list[str], instructions: InstructionSet) -> str:
    """Hash of all that an object depends on: sources, command, compiler, kind of processor."""
    program = Path(shutil.which(compiler[0]) or compiler[0]).resolve()
    about = program.stat()
    words = (*compiler, str(program), about.st_size, about.st_mtime_ns)
    return _digest(SOURCES, *words, *OPTIONS, *instructions.options, platform.machine())


def _digest(sources: Path, *words: object) -> str:
    """Hash of words and of all sources."""
    digest = hashlib.sha256(repr(words).encode())
    for path in sorted(sources.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cached(
    compiler: list[str],
    instructions: InstructionSet,
    folder: Path,
    stack: contextlib.ExitStack,
    most_objects: int,
    loads_from: Callable[[Path], bool],
) -> Path | None:
    """The object in the cache, compiled if it is not there; None: the folder is not safe.

    One process at a time compiles, and a file appears with its whole content. Nobody removes it until the stack ends.
    """
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder) or not loads_from(folder):
        return None
    name = f"{instructions.name}-{_key(compiler, instructions)}"
    lock = folder / f"{name}.lock"
    while True:
        held = stack.enter_context(shared(lock))
        for path in filter(_is_untouched, folder.glob(f"{name}-*.so")):
            os.utime(path)
            return path
        held.close()
        with exclusive(lock):
            found = list(folder.glob(f"{name}-*.so"))
            if any(map(_is_untouched, found)):
                continue  # another process was faster
            for path in found:
                path.unlink()
            for left in folder.glob(f"{name}.*/"):  # by a process that was killed
                shutil.rmtree(left)
            with tempfile.TemporaryDirectory(dir=folder, prefix=f"{name}.") as place:
                new = compiled(compiler, instructions, Path(place))
                new.chmod(0o700)
                kept = new.rename(folder / f"{name}-{_hash(new)}.so")
            if not _is_untouched(kept):  # a file system that keeps no owners or modes
                return None
            _remove_old(folder, most_objects)


def _remove_old(folder: Path, most: int) -> None:
    """Remove all but the objects that were used last, with their locks; none that a process is about to load.

    A process that has loaded an object keeps it.
    """
    objects = sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)
    for path in objects[:-most]:
        lock = path.with_name(f"{path.stem.rpartition('-')[0]}.lock")
        with contextlib.suppress(BlockingIOError), exclusive(lock, wait=False):
            path.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_private(folder: Path) -> bool:
    """Whether a folder belongs to the user alone, and nobody else can put another one in its place."""
    own = os.lstat(folder)
    if not stat.S_ISDIR(own.st_mode) or own.st_uid != os.getuid() or stat.S_IMODE(own.st_mode) & 0o077:
        return False
    path = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow the links that are looked for
    return all(_is_safe(above) for above in path.parents) and all(map(_is_safe, path.resolve().parents))


def _is_safe(path: Path) -> bool:
    """Whether a folder, or a link, belongs to the user or to root, and nobody else can replace its entries."""
    about = os.lstat(path)
    others_write = stat.S_IMODE(about.st_mode) & 0o022 and not about.st_mode & stat.S_ISVTX
    return about.st_uid in (os.getuid(), 0) and (stat.S_ISLNK(about.st_mode) or not others_write)


def _is_untouched(path: Path) -> bool:
    """Whether a file of the cache is the user's own, with the content that its name says."""
    about = os.lstat(path)
    is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and about.st_nlink == 1
    return is_own and not stat.S_IMODE(about.st_mode) & 0o022 and path.stem.rpartition("-")[2] == _hash(path)
