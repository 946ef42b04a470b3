"""The program: `expertmesh`, and `python -m expertmesh`, also under torchrun.

Ctrl-C is answered from here on: what comes first may import next to nothing.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_SAID = b"error: interrupted\n"


def program() -> NoReturn:
    """Runs the command line and ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # it is not ignored
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from expertmesh.cli import main

        main.program()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        _end()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Interrupts as Python does, but ends the process at once where modules are imported: libraries take an interrupt there for their own failure."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _end()
        frame = frame.f_back
    raise KeyboardInterrupt


def _end() -> NoReturn:
    os.write(2, _SAID)
    os._exit(128 + signal.SIGINT)


if __name__ == "__main__":
    program()
