"""`expertmesh runs DIR`: list the runs below a folder, and remove old checkpoints."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from expertmesh.cli.parse import parsed
from expertmesh.config.base import expanded
from expertmesh.config.fields import Operation, Positive, Spelling
from expertmesh.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from expertmesh.training.runs import ListedRun

_WIDTH = 1000
"""Columns of the table without a terminal, if COLUMNS is not set."""


class RunsVerb(Operation):
    """Lists the runs below a folder with their steps, losses and sizes, and removes old checkpoints with --keep.

    examples:
      expertmesh runs runs/
      expertmesh runs runs/ --keep 1
    """

    folder: Annotated[str, Spelling("DIR", also=("run", "run_dir"), is_word=True)]
    """folder that contains the runs"""
    keep: Positive | None = None
    """number of newest checkpoints to keep per run, besides the best and multiples of --train.keep-every; others are
    removed (default: all are kept)"""


def run(argv: list[str]) -> int:
    """Print the list and return 0, or 1 if checkpoints of a run could not be removed."""
    options = parsed(RunsVerb, argv)
    from expertmesh.training.runs import find_runs, look_at, remove_old

    folder = expanded(options.folder)
    paths = find_runs(folder)
    if not paths:
        raise ConfigError(f"{folder}: no run is below it; give the folder that runs are in")
    left = []
    freed = 0
    for path in paths if options.keep is not None else ():
        assert options.keep is not None
        try:
            freed += remove_old(path, keep=options.keep)
        except (ConfigError, CheckpointError) as error:
            left.append(f"left as it is: {error}")
    print(table([look_at(path) for path in paths]))
    for line in left:
        print(line)
    if options.keep is not None:
        print(f"removed {_size(freed)} of checkpoints")
    return 1 if left else 0


def table(runs: Sequence["ListedRun"], width: int | None = None) -> str:
    """Runs, one per line, or a few lines per run if the columns do not fit the terminal."""
    width = shutil.get_terminal_size((_WIDTH, 0)).columns if width is None else width
    rows = [("run", "recipe", "steps", "loss", "validation", "checkpoints", "size", "")]
    for one in runs:
        steps = "?" if one.steps is None else f"{one.steps:,}"
        rows.append(
            (
                str(one.path),
                one.recipe,
                f"{one.step:,} of {steps}",
                _number(one.loss),
                _number(one.evaluation),
                str(one.num_checkpoints),
                _size(one.num_bytes),
                "running" if one.is_running else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    if sum(widths) + 2 * (len(widths) - 1) > width:
        names = rows[0]
        for path, *cells in rows[1:]:
            lines.append(path)
            said = [f"{name} {cell}".strip() for name, cell in zip(names[1:], cells, strict=True)]
            lines += textwrap.wrap(
                ", ".join(filter(None, said)),
                width,
                initial_indent="  ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return "\n".join(lines)
    for row in rows:
        cells = [
            cell.ljust(width) if i < 2 or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _size(number: int) -> str:
    return f"{number / 1e6:,.1f} MB"
