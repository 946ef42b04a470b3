"""A checksum per block: ranks share the work, nothing is left out, and manifests of before there were blocks are
read."""

import hashlib
import json
from collections import Counter

import pytest
from tests.support.calls import calls_of

from expertmesh.checkpoints import manifest
from expertmesh.checkpoints.manifest import described, find_damage, write_manifest

SIZES = {"a": 0, "b": 1, "c": 256, "d": 1000, "e": 4096}
BLOCK = 256


@pytest.fixture
def folder(tmp_path):
    for number, (name, size) in enumerate(SIZES.items()):
        (tmp_path / name).write_bytes(bytes((number + i) % 251 for i in range(size)))
    files = {name: described(tmp_path / name, block_bytes=BLOCK) for name in SIZES}
    write_manifest(tmp_path, files, version=1)
    return tmp_path


def of_before(folder):
    """The manifest with one checksum for each file."""
    files = {
        name: {"size": size, "sha256": hashlib.sha256((folder / name).read_bytes()).hexdigest()}
        for name, size in SIZES.items()
    }
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "files": files}))


def compared(folder, share):
    """What a share reads, as (name, first byte, bytes)."""
    with calls_of(manifest._sha256) as calls:
        assert find_damage(folder, share=share) is None
    return [(told["path"].name, told["start"], told["num_bytes"]) for told, _ in calls]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_each_rank_compares_its_share_and_all_together_everything_once(folder, num_ranks):
    shares = [compared(folder, (i, num_ranks)) for i in range(num_ranks)]
    for share in shares:
        assert sum(size for _, _, size in share) <= sum(SIZES.values()) / num_ranks + BLOCK
    counts = Counter(
        (name, byte) for share in shares for name, start, size in share for byte in range(start, start + size)
    )
    assert set(counts.values()) == {1} and len(counts) == sum(SIZES.values())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_file_of_before_is_compared_by_one_rank(folder, num_ranks):
    of_before(folder)
    shares = [compared(folder, (i, num_ranks)) for i in range(num_ranks)]
    assert sorted(sum(shares, [])) == [(name, 0, size) for name, size in SIZES.items()]


@pytest.mark.parametrize("is_old", [False, True])
def test_every_byte_is_covered(folder, is_old):
    if is_old:
        of_before(folder)
    for name, size in SIZES.items():
        data = (folder / name).read_bytes()
        for place in {0, 255, 256, 700, size - 1} & set(range(size)):
            changed = bytearray(data)
            changed[place] ^= 1
            (folder / name).write_bytes(changed)
            said = [find_damage(folder, share=(i, 2)) for i in range(2)]
            assert sorted(said, key=str) == [None, f"{name} has another checksum"], place
        (folder / name).write_bytes(data)
    assert find_damage(folder) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda entry: entry.pop("blocks"),
        lambda entry: entry["blocks"].pop(),
        lambda entry: entry.update(block_bytes=0),
        lambda entry: entry.update(blocks=None),
        lambda entry: entry.update(block_bytes="many"),
    ],
)
def test_a_manifest_that_says_too_little_is_damage(folder, change):
    values = json.loads((folder / "manifest.json").read_text())
    change(values["files"]["e"])
    (folder / "manifest.json").write_text(json.dumps(values))
    assert find_damage(folder) == "manifest.json is missing or unreadable"
