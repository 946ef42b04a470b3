"""Entry point of `expertmesh` and `python -m expertmesh`, also under torchrun.

Ctrl-C is handled from here on, so this module imports almost nothing before.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

_SAID = b"error: interrupted\n"


def program() -> NoReturn:
    """Run the command line and end the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # SIGINT is not ignored
        signal.signal(signal.SIGINT, _interrupted)
    try:
        from expertmesh.cli import main

        main.program()
    except KeyboardInterrupt:
        if "--debug" in sys.argv:
            raise
        _end()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; during an import end the process, because libraries mistake an interrupt there for their
    own failure."""
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
