"""The checkpoint store: atomic, checked, pruned; errors of the background thread surface."""

import errno
import json
import logging
import math
import pathlib
import pickle
import re
import threading
import time
import zlib

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode

from expertmesh.checkpoints import store as checkpoint
from expertmesh.checkpoints.dcp import Checkpoint, write_tensors
from expertmesh.checkpoints.dcp_files import copy_piece
from expertmesh.checkpoints.manifest import find_damage
from expertmesh.checkpoints.source import read_into
from expertmesh.checkpoints.store import CheckpointStore, list_checkpoints, newest_good, read_state
from expertmesh.errors import CheckpointError


def tensors(value=1.0):
    return {
        "a": torch.full((3, 5), value),
        "deep.b": torch.arange(4, dtype=torch.int64),
        "scalar": torch.tensor(value, dtype=torch.float64),
        "half": torch.full((2,), value, dtype=torch.bfloat16),
    }


@pytest.fixture
def make_store(tmp_path):
    made = []

    def make(**options):
        made.append(CheckpointStore(tmp_path / "checkpoints", keep_last=2, **options))
        return made[-1]

    yield make
    for store in made:
        store.close()


@pytest.fixture
def store(make_store):
    return make_store()


def save(store, step, *, eval_loss=None):
    store.save(step, tensors(float(step)), {"note": "x"}, eval_loss=eval_loss)
    store.wait()


def steps(store):
    return [int(path.name.removeprefix("step_")) for path in store.paths()]


def test_what_was_saved_comes_back(store):
    save(store, 7, eval_loss=1.5)
    path = store.paths()[0]
    assert path.name == "step_00000007" and find_damage(path) is None
    found = {name: torch.zeros_like(t) for name, t in tensors().items()}
    read_into(Checkpoint(path), found)
    for name, tensor in tensors(7.0).items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
    state = read_state(path)
    assert (state["step"], state["note"], state["eval_loss"]) == (7, "x", 1.5)
    assert state["format_version"] == checkpoint.FORMAT_VERSION


def test_torch_itself_can_read_it(store):
    save(store, 3)
    found = {"a": torch.zeros(3, 5)}
    reader = torch.distributed.checkpoint.FileSystemReader(store.paths()[0])
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(found, storage_reader=reader, no_dist=True)
    assert torch.equal(found["a"], torch.full((3, 5), 3.0))


def test_training_may_change_the_tensors_while_they_are_written(make_store):
    gate = threading.Event()

    def slow(folder, given):
        assert gate.wait(300)
        return write_tensors(folder, given)

    store = make_store(write=slow)
    live = tensors(1.0)
    store.save(1, live, {}, eval_loss=None)
    live["a"].fill_(99.0)
    gate.set()
    store.wait()
    found = {"a": torch.zeros(3, 5)}
    read_into(Checkpoint(store.paths()[0]), found)
    assert torch.equal(found["a"], torch.ones(3, 5))


def test_the_last_ones_and_the_best_are_kept(store):
    for step, loss in ((1, math.nan), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
        save(store, step, eval_loss=loss)
    assert steps(store) == [2, 4, 5]
    save(store, 6, eval_loss=0.5)
    assert steps(store) == [5, 6]
    assert not [p for p in store.folder.iterdir() if p.name.startswith(".")]


def test_damaged_ones_of_further_steps_push_nothing_out(store):
    """A run that went on from before them, and is stopped early, must keep what it has just saved."""
    for step in (4, 6):
        save(store, step)
    for path in store.paths():
        damage_manifest(path)
    for step in (2, 3):
        save(store, step)
    assert newest_good(store.folder).name == "step_00000003"
    assert steps(store) == [2, 3, 4, 6]


def test_a_file_that_cannot_be_read_is_named(store):
    save(store, 1)
    (path,) = store.paths()
    (path / "worn").symlink_to("/proc/self/mem")  # a file whose first byte is an error
    manifest = {"files": {"worn": {"size": 0, "sha256": ""}}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(path) == "worn cannot be read: Input/output error"


def test_saving_a_step_again_replaces_it(store):
    save(store, 1)
    store.save(1, tensors(5.0), {}, eval_loss=None)
    store.wait()
    found = {"scalar": torch.zeros((), dtype=torch.float64)}
    read_into(Checkpoint(store.paths()[0]), found)
    assert found["scalar"] == 5.0 and steps(store) == [1]


def damage_truncate(path):
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-10])


def damage_flip(path):
    file = next(path.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def damage_state(path):
    text = (path / "state.json").read_text()
    (path / "state.json").write_text(text.replace('"x"', '"y"'))


def damage_metadata(path):
    (path / ".metadata").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_text('{"files": {')


def damage_empty(path):
    for file in path.iterdir():
        file.unlink()


DAMAGES = {
    damage_truncate: "bytes, not",
    damage_flip: "checksum",
    damage_state: "state.json has another checksum",
    damage_metadata: ".metadata is missing",
    damage_manifest: "manifest.json",
    damage_empty: "manifest.json",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda f: f.__name__)
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(store, caplog, damage):
    save(store, 1)
    save(store, 2)
    damage(store.paths()[-1])
    with caplog.at_level(logging.WARNING):
        assert newest_good(store.folder).name == "step_00000001"
    (record,) = caplog.records
    assert "step_00000002" in record.getMessage() and DAMAGES[damage] in record.getMessage()


def test_every_single_bit_of_the_data_is_covered(store):
    save(store, 1)
    file = next(store.paths()[0].glob("*.distcp"))
    data = file.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 40)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << (place % 8)
        file.write_bytes(flipped)
        assert find_damage(store.paths()[0]) is not None, place
    file.write_bytes(data)
    assert find_damage(store.paths()[0]) is None


def test_only_damaged_checkpoints_are_an_error_and_none_is_none(store, tmp_path):
    assert newest_good(tmp_path / "nowhere") is None
    save(store, 1)
    damage_flip(store.paths()[0])
    with pytest.raises(CheckpointError, match="all 1 checkpoints are damaged"):
        newest_good(store.folder)


def test_a_full_disk_surfaces_and_leaves_the_checkpoints_before(make_store):
    """/dev/full: the operating system's own ENOSPC, through torch's writer."""
    is_full = False

    def write(folder, given):
        if is_full:
            (folder / "__0_0.distcp").symlink_to("/dev/full")
        return write_tensors(folder, given)

    store = make_store(write=write)
    save(store, 1)
    is_full = True
    store.save(2, tensors(), {}, eval_loss=None)
    with pytest.raises(OSError) as info:
        store.wait()
    assert info.value.errno == errno.ENOSPC
    assert steps(store) == [1] and find_damage(store.paths()[0]) is None
    assert not [p for p in store.folder.iterdir() if p.name.startswith(".")]
    is_full = False
    save(store, 3)
    assert steps(store) == [1, 3]


def test_check_raises_without_waiting_for_a_save_that_runs(make_store):
    gate = threading.Event()
    store = make_store(write=lambda *a: gate.wait() and 1 / 0)
    store.save(1, tensors(), {}, eval_loss=None)
    store.check()
    gate.set()
    with pytest.raises(ZeroDivisionError):
        while store.check() is None:
            time.sleep(0.01)


def test_leftovers_of_a_killed_process_are_removed(store):
    save(store, 1)
    for name in (".partial-step_00000002", ".deleted-step_00000000"):
        (store.folder / name).mkdir()
    store.remove_leftovers()
    assert [p.name for p in store.folder.iterdir()] == ["step_00000001"]
    assert list_checkpoints(store.folder) == store.paths()


@pytest.mark.parametrize(
    "asked, words",
    [
        ({"other": torch.zeros(1)}, "has no tensor other"),
        ({"a": torch.zeros(3, 6)}, r"a has shape \(3, 5\), the model's is \(3, 6\)"),
    ],
)
def test_tensors_of_another_model_are_named(store, asked, words):
    save(store, 1)
    with pytest.raises(CheckpointError, match=words):
        read_into(Checkpoint(store.paths()[0]), asked)


@pytest.mark.parametrize(
    "name",
    [
        "step_00000002_mine",
        "step_abc",
        "step_2",
        "step_000000030",
        "best",
        ".partial-mine",
        ".deleted-mine",
    ],
)
def test_folders_of_other_names_are_the_users(store, name):
    copy = store.folder / name
    save(store, 1)
    copy.mkdir()
    (copy / "note").write_text("mine")
    for step in (2, 3, 4):
        save(store, step)
    store.remove_leftovers()
    assert (copy / "note").read_text() == "mine"
    assert steps(store) == [3, 4]
    assert newest_good(store.folder).name == "step_00000004"


class Command:
    """What unpickles by running something."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


def with_a_command(index, mark):
    index.planner_data = {"a": Command(mark)}


def with_a_command_in_torch(index, mark):
    class Sneaky:
        def __reduce__(self):
            return (torch.serialization.os.makedirs, (str(mark),))

    index.storage_meta = Sneaky()


def outside_the_folder(index, mark):
    for place in index.storage_data.values():
        place.relative_path = f"../step_00000001/{place.relative_path}"


def with_an_extension(index, mark):
    for place in index.storage_data.values():
        place.transform_descriptors = ["zstd"]


def with_a_pickle_in_place_of_a_tensor(index, mark):
    index.state_dict_metadata["a"] = BytesStorageMetadata()


def of_another_kind(index, mark):
    index.storage_data = {"a": 1}


@pytest.mark.parametrize(
    "change",
    [
        with_a_command,
        with_a_command_in_torch,
        outside_the_folder,
        with_an_extension,
        with_a_pickle_in_place_of_a_tensor,
        of_another_kind,
    ],
    ids=lambda f: f.__name__,
)
def test_nothing_in_a_checkpoint_runs(store, tmp_path, change):
    save(store, 1)
    path, mark = store.paths()[0], tmp_path / "ran"
    index = pickle.loads((path / ".metadata").read_bytes())
    change(index, mark)
    (path / ".metadata").write_bytes(pickle.dumps(index))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = checkpoint._flushed(path / ".metadata")
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert newest_good(store.folder) == path, "its checksums are right"
    with pytest.raises(CheckpointError, match="is unreadable|has no tensor a"):
        read_into(Checkpoint(path), {"a": torch.zeros(3, 5)})
    assert not mark.exists()


def test_a_record_between_ranks_runs_nothing(store, tmp_path):
    record, mark = tmp_path / ".written-1", tmp_path / "ran"
    record.write_bytes(pickle.dumps(Command(mark)))
    with pytest.raises(CheckpointError, match="is unreadable"):
        store._record(record)
    assert not mark.exists()


def with_checksum(data, old, new):
    """An archive with another content of a file, whose checksum is right."""
    sums = [zlib.crc32(content).to_bytes(4, "little") for content in (old, new)]
    return data.replace(old, new).replace(*sums)


def in_directory(data, offset, value):
    """An archive with two bytes of each entry of its directory changed."""
    data = bytearray(data)
    for found in re.finditer(b"PK\x01\x02", bytes(data)):
        at = found.start() + offset
        data[at : at + 2] = value.to_bytes(2, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:40], "hold no tensors of this checkpoint"),
        (lambda data: data.replace(b"/data/0", b"/data/1"), "no single tensor"),
        (lambda data: b"\0" * len(data), "hold no tensors of this checkpoint"),
        (lambda data: with_checksum(data, b"little", b"bigger"), "in another order"),
        (lambda data: in_directory(data, 6, 99), "zip file version 9.9"),
        (lambda data: in_directory(data, 8, 1), "encrypted"),
    ],
    ids=["cut", "none", "zeros", "order", "version", "encrypted"],
)
def test_files_of_tensors_that_are_none_are_refused(store, change, words):
    save(store, 1)
    path = store.paths()[0]
    file = next(path.glob("*.distcp"))
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=words):
        read_into(Checkpoint(path), {"a": torch.zeros(3, 5)})


class _Copies(TorchDispatchMode):
    """Counts copies between tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.copy_.default
        return func(*args, **(kwargs or {}))


def test_a_device_gets_a_tensor_in_few_copies(tmp_path):
    """The host waits for each copy to a GPU; "meta" stands for one."""
    whole, path = torch.zeros(1 << 10, 1 << 8), tmp_path / "piece"
    torch.save(whole, path)
    with _Copies() as copies:
        copy_piece(
            torch.empty_like(whole, device="meta"),
            path,
            tuple(slice(0, size) for size in whole.shape),
            offset=0,
            length=path.stat().st_size,
            dtype=whole.dtype,
            sizes=whole.shape,
        )
    assert copies.count == 1
