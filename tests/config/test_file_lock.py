"""Lock files: who has one, keeps others out, also where a former holder has removed the file meanwhile."""

import fcntl
import sys
from functools import partial

import pytest

from expertmesh.config.file_lock import exclusive, shared


@pytest.mark.parametrize("take", [exclusive, partial(exclusive, wait=False), shared])
@pytest.mark.parametrize("is_made_anew", [False, True])
def test_a_file_that_is_removed_meanwhile_is_not_held(take, is_made_anew, tmp_path):
    path, removed = tmp_path / "lock", []

    def remove(frame, event, function):
        if event == "c_call" and function is fcntl.flock and not removed:
            removed.append(path.unlink())
            if is_made_anew:
                path.touch()

    before = sys.getprofile()
    sys.setprofile(remove)
    try:
        held = take(path)
    finally:
        sys.setprofile(before)
    assert removed
    with held, pytest.raises(BlockingIOError):
        exclusive(path, wait=False)
    exclusive(path, wait=False).close()
    assert path.exists()


def test_a_shared_lock_has_several_holders(tmp_path):
    with shared(tmp_path / "lock"), shared(tmp_path / "lock"), pytest.raises(BlockingIOError):
        exclusive(tmp_path / "lock", wait=False)
