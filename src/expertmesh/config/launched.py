"""Place of this process among those that torchrun started, from its environment variables. Never imports torch."""

import os
from pathlib import Path


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> tuple[int, int]:
    """(rank, world size) of this process as torchrun set them; (0, 1) without torchrun."""
    if not is_launched():
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def is_first_on_host() -> bool:
    """Whether this process has local rank 0 on its host; true without torchrun."""
    return not is_launched() or os.environ["LOCAL_RANK"] == "0"


def ranks_on_host() -> int:
    """Processes that torchrun started on this host; 1 without torchrun."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else 1


def launcher_error_file() -> Path | None:
    """File from which torchrun reads why this process failed; None without torchrun, or where it keeps no logs."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None
