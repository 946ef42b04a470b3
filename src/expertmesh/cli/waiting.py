"""Passive waiting of OpenMP threads: idle threads sleep, where by default they spin and take cores from busy
threads."""

import os
import sys
from collections.abc import Container, MutableMapping

_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that control waiting in the OpenMP of GCC, LLVM and Intel; all of them read the first."""


def wait_passively(environment: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> bool:
    """Make OpenMP threads of this process and its children sleep while waiting, unless the user has set how they wait.

    OpenMP reads the setting when torch loads it; later calls have no effect.
    """
    if "torch" in loaded or any(environment.get(name) for name in _SETTINGS):
        return False
    environment[_SETTINGS[0]] = "PASSIVE"
    return True
