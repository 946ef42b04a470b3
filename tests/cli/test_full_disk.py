"""A disk that is full, for real: a small file system in memory. One line, nothing lost, nothing left behind."""

import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from expertmesh.checkpoints.dcp import write_tensors
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.cli.main import main
from expertmesh.config.output_file import output_file
from expertmesh.errors import ConfigError
from expertmesh.runs.run_dir import RunDir
from expertmesh.training.metrics import MetricsFile
from expertmesh.training.trackers import TensorBoard


@pytest.fixture
def disk(tmp_path, request):
    """A file system of so many bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path, *, but: int) -> None:
    """Leave so many bytes free."""
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "filling").write_bytes(bytes(free - but))


def whole_run(place, disk):
    fill(disk, but=0)
    return place.train("--train.run-dir", str(disk / "run"))


def first_checkpoint(place, disk):
    return place.train("--train.run-dir", str(disk / "run"), "--train.no-tensorboard")


def token_cache(place, disk):
    fill(disk, but=1 << 14)
    return place.train("--data.cache-dir", str(disk / "cache"))


def exported(place, disk):
    place.with_run()
    fill(disk, but=1 << 16)
    return ["export", place.path("run"), "--output", str(disk / "out.safetensors")]


def overwritten(place, disk):
    (disk / "out.safetensors").write_text("precious")
    return [*exported(place, disk), "--overwrite"]


def page(place, disk):
    place.with_run()
    (disk / "page.html").write_text("precious")
    fill(disk, but=1 << 16)
    return ["report", place.path("run"), "--page", str(disk / "page.html")]


def to_hub(place, disk):
    place.with_run()
    fill(disk, but=1 << 16)
    return ["convert", "--from", place.path("run"), "--to", str(disk / "new")]


def from_hub(place, disk):
    place.with_run()
    assert main(["convert", "--from", place.path("run"), "--to", place.path("hub")]) == 0
    fill(disk, but=1 << 16)
    return ["convert", "--from", place.path("hub"), "--to", str(disk / "new")]


CALLS = [
    whole_run, first_checkpoint, token_cache, exported, overwritten, page, to_hub, from_hub,
]  # fmt: skip


@pytest.mark.parametrize("disk", [2 << 20], indirect=True)
@pytest.mark.parametrize("call", CALLS)
def test_one_line_says_that_the_disk_is_full(place, disk, call, capfd):
    words = call(place, disk)
    capfd.readouterr()
    assert main(words) == 1
    said = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error:")]
    assert len(said) == 1 and "No space left on device" in said[0] and "free some" in said[0]
    assert f"({disk}/" in said[0], "it names the file"
    leftovers = [p.name for p in disk.rglob("*") if ".partial" in p.name]
    assert leftovers == []
    assert not (disk / "new").exists()
    for name in ("out.safetensors", "page.html"):
        if (disk / name).exists():
            assert (disk / name).read_text() == "precious"


@pytest.fixture
def size_limit():
    """A function that lets files grow to so many bytes only: writing fails as on a full disk, without any right."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


WRITERS = {
    "out.safetensors": ["export", "run", "--output", "out.safetensors"],
    "page.html": ["report", "run", "--page", "page.html"],
    "hub": ["convert", "--from", "run", "--to", "hub"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_cannot_grow_is_named(place, name, size_limit, capfd, monkeypatch):
    monkeypatch.chdir(place.folder)
    place.with_run()
    size_limit(1 << 14)
    before = sorted(place.folder.iterdir())
    assert main(WRITERS[name]) == 1
    said = [x for x in capfd.readouterr().err.splitlines() if x.startswith("error:")]
    assert said == [(f"error: File too large ({name}); files may not be so large here: raise the limit (ulimit -f), or "
                    "choose another disk")]  # fmt: skip
    assert sorted(place.folder.iterdir()) == before


def test_answers_before_a_full_disk_are_kept(place, size_limit, capsys):
    place.with_run()
    asked, answered = place.folder / "asked.txt", place.folder / "answered.jsonl"
    asked.write_text("".join(f"def f{number}\n" for number in range(6)))
    words = ["generate", place.path("run"), "--input", str(asked), "--output", str(answered)]
    words += ["--greedy", "--max-tokens", "3", "--batch-size", "2"]
    assert main(words) == 0
    lines = answered.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    answered.write_text("precious")
    capsys.readouterr()  # in memory, as a file of the test run could not grow
    part = place.folder / "answered.jsonl.part"
    for room, count in ((len(b"".join(lines[:3])) + 5, 3), (5, 0)):
        part.unlink(missing_ok=True)
        before = sorted(place.folder.iterdir())
        size_limit(room)
        assert main(words) == 1
        computing, *notes, error = capsys.readouterr().err.splitlines()
        assert computing.startswith("computing in float32")
        assert error.startswith(f"error: File too large ({answered}); files may not be so large")
        kept = [f"note: the first {count} of 6 texts are in {part}"] if count else []
        assert notes == kept
        assert sorted(place.folder.iterdir()) == sorted([*before, *([part] if count else [])])
        if count:
            assert part.read_bytes() == b"".join(lines[:count])
    assert answered.read_text() == "precious"


def test_a_conversion_whose_last_file_does_not_fit_leaves_nothing(place, size_limit, capfd):
    place.with_run()
    hub, new = place.folder / "hub", place.folder / "new"
    assert main(["convert", "--from", place.path("run"), "--to", str(hub)]) == 0
    with (hub / "tokenizer.model").open("wb") as file:
        file.truncate(1 << 24)
    size_limit((1 << 24) - 1)
    assert main(["convert", "--from", str(hub), "--to", str(new)]) == 1
    assert "File too large" in capfd.readouterr().err and not new.exists()


def test_files_of_a_run_are_named(tmp_path, size_limit):
    folder = RunDir(tmp_path / "run")
    metrics = MetricsFile(tmp_path / "metrics.jsonl", last_step=0)
    size_limit(0)
    with pytest.raises(OSError) as caught, folder.locked():
        raise AssertionError("locked")
    assert caught.value.filename == str(folder.lock) and not folder.path.exists()
    for write in (lambda: metrics.write({"step": 1}), metrics.close):
        with pytest.raises(OSError) as caught:
            write()
        assert caught.value.filename == str(metrics.path)


def test_tensorboards_files_are_named_and_its_thread_says_nothing(tmp_path, size_limit, capfd):
    pytest.importorskip("tensorboard")
    mine = threading.excepthook
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        TensorBoard(tmp_path / "file" / "below", last_step=0)
    assert threading.excepthook is mine
    events = TensorBoard(tmp_path / "events", last_step=0)
    size_limit(0)
    before = set(threading.enumerate())
    with pytest.raises(OSError) as caught:
        TensorBoard(tmp_path / "others", last_step=0)
    assert caught.value.filename == str(tmp_path / "others")
    for thread in set(threading.enumerate()) - before:
        thread.join()

    def write_all():
        for step in range(1, 10_000):
            events.write({"step": step, "loss": 1.0}, None)

    for call in (write_all, events.close):
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.filename == str(tmp_path / "events")
    assert threading.excepthook is mine and "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_whose_last_files_do_not_fit_is_named(tmp_path, size_limit):
    def write(folder, staged):
        results = write_tensors(folder, staged)
        size_limit(0)
        return results

    store = CheckpointStore(tmp_path, keep_last=1, write=write)
    store.save(1, {"a": torch.zeros(3)}, {}, eval_loss=None)
    with pytest.raises(OSError) as caught:
        store.wait()
    store.close()
    assert caught.value.filename == str(tmp_path / "step_00000001")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("disk", [1 << 20], indirect=True)
def test_a_disk_that_cannot_be_written_is_said_before_the_work(disk):
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(ConfigError, match=f"{disk} cannot be written: Read-only file system"):
        output_file("output", disk / "new")


@pytest.mark.parametrize("disk", [16 << 20], indirect=True)
def test_what_was_saved_before_is_kept_and_goes_on_when_there_is_space(place, disk, capfd):
    (saved,) = place.finished.glob("checkpoints/step_*")
    size = sum(path.stat().st_size for path in saved.iterdir())
    fill(disk, but=size * 2)  # and the run has other files, so the second does not fit
    words = place.train("--train.run-dir", str(disk / "run"), "--train.checkpoint-every", "1")
    assert main(words) == 1
    assert "No space left" in capfd.readouterr().err
    assert [path.name for path in disk.glob("run/checkpoints/*")] == ["step_00000001"]
    (disk / "filling").unlink()
    assert main([*words, "--train.resume", "auto"]) == 0
    assert "resuming after step 1" in capfd.readouterr().out
