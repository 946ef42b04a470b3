"""What a person at a terminal sees while a verb prepares, evaluates and samples, and that Ctrl-C is answered at
once."""

import fcntl
import gzip
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import threading
from contextlib import contextmanager, redirect_stderr
from pathlib import Path

from tests.support.patience import PATIENCE_S

from expertmesh.cli.main import main
from expertmesh.data import data_progress

COLUMNS = 80
CLEAR = "\r\x1b[2K"


@contextmanager
def terminal():
    """Standard error is a terminal of 80 columns inside; afterwards the list has what was shown."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    shown, parts, is_over = [], [], threading.Event()

    def read():
        while not is_over.is_set() or _has_more(master):
            if _has_more(master):
                parts.append(os.read(master, 1 << 16))

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(slave, "w") as stream:
        try:
            with redirect_stderr(stream):
                yield shown
        finally:
            stream.flush()
            is_over.set()
            thread.join()
    os.close(master)
    shown += b"".join(parts).decode().split(CLEAR)


def _has_more(terminal, wait_s=0.1):
    return bool(select.select([terminal], [], [], wait_s)[0])


def test_every_long_part_says_how_far_it_is(place, threshold):
    threshold(data_progress, "EVERY_S", 0.0)
    folder = place.folder / "texts"
    folder.mkdir()
    text = Path(place.path("corpus.txt")).read_text()
    (folder / "a.txt").write_text(text)
    (folder / "b.gz").write_bytes(gzip.compress(text.upper().encode()))
    (folder / "c.jsonl").write_text('{"text": "one of many lines"}\n' * 9)
    new = ["--data.path", str(folder), "--data.cache-dir", place.path("new")]
    with terminal() as lines:
        assert main(place.train(*new)) == 0
        for tokens in ("3", "999"):
            assert main(["report", place.path("run"), "--samples", "1", "--tokens", tokens]) == 0
    for pattern in (
        "loading",
        r"found \d+ files",
        r"looked at \d of 3 files",
        r"unpacked [0-9.]+ MB of text",
        r"looked through [0-9.]+ MB of text",
        r"read [0-9.]+ of 0.4 MB of text",
        "learning a tokenizer of 512 tokens",
        r"tokenised [0-9.]+ of [0-9.]+ MB of text",
        r"checked [0-9.]+ of [0-9.]+ MB of tokens",
        r"evaluated \d+ of \d+ validation samples",
        r"counted for the baseline: [0-9.]+ of [0-9.]+ MB of text",
        r"written \d of \d samples",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), pattern
    assert max(len(line) for line in lines) < COLUMNS
    assert lines[-1].startswith("computing in "), "a line of progress stays on the screen"


BUSY = """
import hashlib, os
from expertmesh.cli.terminal_progress import loading, told_of_data
with told_of_data(), loading():
    while True:
        try:
            os.write(2, b"busy")
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", (1 << 31) - 1)  # in C for an hour, as a tokenizer is learned
        except KeyboardInterrupt:
            pass  # it came before that began
"""


def test_ctrl_c_is_answered_while_a_library_is_busy_and_the_second_one_ends_it():
    pid, master = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
        os.execv(sys.executable, [sys.executable, "-c", BUSY])
    shown = b""
    try:
        for wanted in (b"busy", b"SIGINT: stopping; Ctrl-C again: now"):
            while wanted not in shown:
                assert _has_more(master, PATIENCE_S), shown
                shown += os.read(master, 1 << 12)
            os.write(master, b"\x03")
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # it would be busy for its hour
        raise
    finally:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(master)
    assert code == 130
