"""Several processes with one voice: what torchrun's ranks print, and what torchrun learns of a failure."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from expertmesh.config.base import is_first_on_host, launcher_error_file
from expertmesh.errors import ConfigError, PeerError


@contextmanager
def said_once() -> Iterator[None]:
    """Mistakes that every process of a host makes alike, as in the command line, are said by the first of them.

    Raises:
        PeerError: on the others, in the place of a ConfigError.
    """
    try:
        yield
    except ConfigError:
        if is_first_on_host():
            raise
        raise PeerError("the first rank of this host says what is wrong") from None


def tell_launcher(message: str) -> None:
    """Let torchrun's own report end with the reason of the failure; without torchrun, nothing."""
    path = launcher_error_file()
    if path is None:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
