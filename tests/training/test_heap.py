import sys

import pytest

from expertmesh.training.heap import HeapTrim, anonymous_bytes, keep_freed_memory


def test_glibc_takes_the_settings_and_others_are_left_alone(monkeypatch):
    if sys.platform.startswith("linux"):
        assert keep_freed_memory() and HeapTrim().trim is not None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()
    HeapTrim(size=lambda: 1 // 0).after_step()  # without a trim nothing is looked at


@pytest.mark.parametrize(
    ("sizes", "trims"),
    [
        ([100, 100, 112, 114], 0),
        ([100, 116], 1),
        ([100, 151, 140, 160, 162, 50, 76], 3),  # what is needed is measured anew after each
    ],
)
def test_a_heap_that_has_grown_is_trimmed(sizes, trims):
    left, given = iter(sizes), []
    heap = HeapTrim(size=lambda: next(left), trim=given.append)
    for _ in sizes:
        heap.after_step()
    assert given == [0] * trims


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_size_is_that_of_memory_in_use():
    before = anonymous_bytes()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])
    assert anonymous_bytes() - before > 60 * 2**20


def test_what_other_work_left_is_given_back_before_the_steps():
    left, given = iter([100, 300, 300]), []
    heap = HeapTrim(size=lambda: next(left), trim=given.append)
    heap.after_step()
    heap.before_steps()
    heap.after_step()
    heap.after_step()
    assert given == [0], "what a step needs is measured anew, and a step that needs it is not trimmed"
