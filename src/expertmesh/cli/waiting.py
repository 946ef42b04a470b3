"""Threads that have nothing to do sleep. By default they look for work in a loop, and take cores from the threads that have some."""

import os
import sys
from collections.abc import Container, MutableMapping

_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""By which users of GCC's, LLVM's and Intel's OpenMP say how threads wait; all of these libraries read the first one."""


def wait_passively(
    environment: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules
) -> bool:
    """Let the threads of OpenMP, and of the programs that this one starts, sleep while they wait, unless the user has set how they wait.

    The library reads the setting when torch loads it: this has no effect afterwards.

    Args:
        environment: of this process.
        loaded: modules.

    Returns:
        Whether the setting was made.
    """
    if "torch" in loaded or any(environment.get(name) for name in _SETTINGS):
        return False
    environment[_SETTINGS[0]] = "PASSIVE"
    return True
