"""Weights in pages of 2 MB: where the system has them, and ordinary memory elsewhere."""

import contextvars
import json
import logging
import mmap
import subprocess
import sys

import pytest
import torch
from tests.support.hub_text import hub_folder
from tests.support.large_hub import enlarged
from tests.support.patience import PATIENCE_S

import expertmesh as em
from expertmesh.parallel.huge_pages import (
    LEAST_BYTES,
    PAGE_BYTES,
    huge_page_bytes,
    huge_page_mode,
    in_huge_pages,
    is_wanted,
    say_huge_pages,
    zeros_in_huge_pages,
)

LARGE = torch.Size((3, LEAST_BYTES // 2, 1))
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such pages")


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    with in_huge_pages():
        yield


@LINUX
@pytest.mark.parametrize(("said", "wanted"), [(None, [False, True]), ("1", [True] * 2), ("0", [False] * 2)])
def test_the_environment_decides_before_the_program(monkeypatch, said, wanted):
    if said is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", said)
    assert [contextvars.Context().run(is_wanted), is_wanted()] == wanted


def refusing(*args, **options):
    raise OSError(12, "no memory")


class Unadvised(mmap.mmap):
    """Memory of a system without such pages."""

    def madvise(self, *args):
        raise OSError(22, "invalid")


@pytest.mark.parametrize("way", ["as it is", "off", "no memory", "no such pages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float32])
@pytest.mark.parametrize("shape", [LARGE, torch.Size((0, 4)), torch.Size((5, 3)), torch.Size(())])
def test_memory_is_zeros_that_can_be_written(monkeypatch, way, dtype, shape):
    if way == "off":
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    makers = {"no memory": refusing, "no such pages": Unadvised}
    t = zeros_in_huge_pages(shape, dtype, make=makers.get(way, mmap.mmap))
    assert (t.shape, t.dtype, t.is_contiguous()) == (shape, dtype, True)
    assert not t.any()
    t.fill_(3)
    assert (t == 3).all()
    assert torch.equal(t.clone(), t) and t.sum() == 3 * t.numel()


@LINUX
def test_large_tensors_are_in_huge_pages():
    before = huge_page_bytes()
    t = zeros_in_huge_pages(LARGE, torch.float32)
    assert t.data_ptr() % PAGE_BYTES == 0
    assert huge_page_bytes() - before < t.nbytes // 2, "it is not touched yet"
    t.fill_(1)
    if huge_page_mode() in ("always", "madvise"):
        # a machine with little memory may give fewer
        assert huge_page_bytes() - before >= PAGE_BYTES
    small = zeros_in_huge_pages(torch.Size((LEAST_BYTES - 1,)), torch.int8)
    assert small.untyped_storage().nbytes() == small.nbytes


@pytest.mark.parametrize(
    ("text", "mode"),
    [("always [madvise] never\n", "madvise"), ("[always] madvise never", "always"), (None, "")],
)
def test_the_mode_of_the_system(tmp_path, text, mode):
    if text is not None:
        (folder := tmp_path / "sys/kernel/mm/transparent_hugepage").mkdir(parents=True)
        (folder / "enabled").write_text(text)
    assert huge_page_mode(tmp_path) == mode


def functions_of(run):
    """Names of the functions that a call has called, and its result."""
    names = set()
    sys.setprofile(lambda frame, event, arg: names.add(frame.f_code.co_name))
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return names, result


def test_nothing_is_drawn_for_weights_that_are_read(tmp_path):
    folder = hub_folder(tmp_path / "hub")
    names, opened = functions_of(lambda: em.load(folder))
    assert "read_into" in names and "init_weights" not in names
    assert all(t.isfinite().all() for t in opened.model.state_dict().values())


@pytest.mark.parametrize("num_bytes", [LEAST_BYTES - 1, LEAST_BYTES])
def test_a_load_says_how_much_is_in_them(caplog, num_bytes):
    with caplog.at_level(logging.INFO, "expertmesh.checkpoints"):
        say_huge_pages(num_bytes)
    assert len(caplog.records) == (num_bytes >= LEAST_BYTES and bool(huge_page_mode()))


@pytest.mark.parametrize("slots", [None, 2])
def test_paged_experts_have_no_huge_pages(tmp_path, slots):
    folder = hub_folder(tmp_path / "hub")
    names, _ = functions_of(lambda: em.Engine(folder, expert_slots=slots, num_blocks=8, device="cpu"))
    assert "give_memory" in names
    assert ("zeros_in_huge_pages" in names) == (slots is None)


LOADED = """
import json, sys, threading, time
from pathlib import Path
import torch
import expertmesh as em
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10
em.load(sys.argv[1])
before, seen, ends = anonymous(), [], threading.Event()
def watch():
    while not ends.is_set():
        seen.append(anonymous())
        time.sleep(0.001)
watcher = threading.Thread(target=watch)
watcher.start()
model = em.load(sys.argv[2]).model
ends.set()
watcher.join()
held = sum(t.nbytes for t in model.state_dict().values())
seen.append(anonymous())
print(json.dumps([held, max(seen) - before, seen[-1] - before, len(seen)]))
"""


@LINUX
def test_the_peak_of_a_load_is_the_model(tmp_path):
    """By memory that is no file's: pages of mapped files can be taken back at any time."""
    small, large = hub_folder(tmp_path / "small", "mixtral"), tmp_path / "large"
    made = enlarged(small, large, hidden=4096, layers=2, experts=32)
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(small), str(large)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    held, peak, after, count = json.loads(done.stdout)
    assert held >= made and count > 5
    assert 0.9 * held < after <= peak < 1.1 * held
