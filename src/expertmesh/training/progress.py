"""What a person sees while a run trains: a live table on a terminal, plain lines elsewhere."""

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from expertmesh.models.family import Family
from expertmesh.training.evaluate import Evaluation
from expertmesh.training.metrics import StepMetrics

_PLAIN_LINES = 40
_NOBODY = (errno.EPIPE, errno.EIO)
"""Errors of a dead pipe, and of a terminal that was closed."""
_WIDE = 60
"""Columns that a terminal must have for a bar beside the numbers."""


class _Console(Console):
    """Says that nobody reads any more, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _to_stderr(text: str) -> None:
    """A line on standard error, which may be lost, too."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


class ProgressReport:
    """Shows steps and evaluations; a context manager. When nobody reads any more it falls silent and says so.

    Args:
        console: where to write; None: standard output.
        family: what is trained; names the items and the metric.
        total_steps: the number of steps of the run.
        first_step: steps done before.
        every: steps between plain lines; None: about forty lines.
        on_lost: called when what is written reaches nobody: a dead pipe, a closed terminal. A full disk below standard output
            is no reason to stop.
    """

    def __init__(
        self,
        console: Console | None,
        *,
        family: Family,
        total_steps: int,
        first_step: int,
        every: int | None = None,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._family = family
        self.console = console or _Console(highlight=False)
        self._on_lost = on_lost
        self._is_lost = False
        self._total, self._first = total_steps, first_step
        self._every = every or max(1, (total_steps - first_step) // _PLAIN_LINES)
        self._evaluation: Evaluation | None = None
        self._last: StepMetrics | None = None
        self._done = 0
        self._items, self._seconds = 0.0, 0.0  # means over the last steps; later ones count more
        self._rate = 0.0
        self._live: Live | None = None
        self._shown: Group | None = None
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            *([BarColumn()] if self.console.width >= _WIDE else []),
            *times,
            console=self.console,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=first_step)

    def __enter__(self) -> "ProgressReport":
        """Start the display."""
        if self.console.is_terminal:
            self._live = Live(self._bar, console=self.console, refresh_per_second=4)
            with self._heard():
                self._live.start()
            if self.console.quiet:
                self._live = None
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the display; what it shows stays on the screen."""
        if self._live is not None:
            with self._heard():
                self._live.stop()

    @contextmanager
    def _heard(self) -> Iterator[None]:
        """Falls silent when what is written inside cannot be. (rich ends the process where a pipe is dead.)"""
        try:
            yield
        except (OSError, SystemExit) as error:
            self._lose(error)

    def _lose(self, error: OSError | SystemExit) -> None:
        self.console.quiet = self._is_lost = True
        if isinstance(error, SystemExit | BrokenPipeError) or error.errno in _NOBODY:
            _to_stderr("nobody reads standard output any more: stopping after this step, to save")
            self._on_lost()
            return
        _to_stderr(
            f"warning: standard output cannot be written ({error.strerror}); the run goes on without it, its numbers are in"
            " its metrics.jsonl"
        )

    def last_word(self, text: str) -> None:
        """A line that must be heard: on standard error where standard output is lost."""
        self.message(text)
        if self._is_lost:
            _to_stderr(text)

    def message(self, text: str) -> None:
        """One line of its own."""
        with self._heard():
            self.console.print(text, markup=False, soft_wrap=True)

    def asked(self, number: signal.Signals) -> None:
        """Says at once that a signal came; callable in the middle of anything, a signal's handler among it."""
        again = "; Ctrl-C again: now, without saving" if number == signal.SIGINT else ""
        text = f"{number.name}: stopping after this step, to save{again}"
        if self._live is not None:
            # Its own thread draws it.
            shown = [] if self._shown is None else [self._shown]
            self._live.update(Group(*shown, Text(text)))
        elif not self.console.quiet:
            _to_stderr(text)  # not through the console: it may be writing just now

    def evaluation(self, step: int, result: Evaluation) -> None:
        """An evaluation after `step` steps."""
        self._evaluation = result
        metric = self._family.metric
        judged = f", {result[metric.key]:.4f} {metric.text}" if metric.key != "loss" else ""
        self.message(f"step {step}: validation loss {result['loss']:.4f}{judged}")
        if self._last is not None:
            self._draw(self._last)

    def step(self, metrics: StepMetrics) -> None:
        """A step is done."""
        count, self._done = metrics.items - self._done, metrics.items
        seconds = count / max(metrics.items_per_second, 1e-9)
        keep = 0.9 if metrics.step > self._first + 2 else 0.0  # the first step prepares much
        self._items = keep * self._items + (1 - keep) * count
        self._seconds = keep * self._seconds + (1 - keep) * seconds
        self._rate = self._items / max(self._seconds, 1e-9)
        self._last = metrics
        self._draw(metrics)
        if self._live is not None:
            self._bar.update(self._task, completed=metrics.step)
        elif metrics.step % self._every == 0 or metrics.step in (self._first + 1, self._total):
            cells = ", ".join(f"{name} {text}" for name, text in self._cells(metrics))
            self.message(f"step {metrics.step}/{self._total}: {cells}, ETA {self._eta(metrics)}")

    def _draw(self, metrics: StepMetrics) -> None:
        if self._live is not None:
            self._shown = Group(self._bar, self._table(metrics))
            self._live.update(self._shown)

    def _cells(self, metrics: StepMetrics) -> list[tuple[str, str]]:
        """Names of numbers, and the numbers as texts."""
        cells = [
            ("loss", f"{metrics.loss:.4f}"),
            (f"{self._family.items}/s", f"{self._rate:,.0f}"),
            ("grad norm", f"{metrics.grad_norm:.3f}"),
            ("lr", f"{metrics.lr:.2e}"),
        ]
        if (load := metrics.load) is not None:
            cells += [
                ("expert load max/mean", f"{load.load_imbalance:.2f}"),
                ("dropped", f"{load.dropped_fraction:.2%}"),
                ("dead experts", str(load.dead_experts)),
            ]
        if metrics.skipped_steps:
            cells.append(("skipped steps", str(metrics.skipped_steps)))
        return cells

    def _table(self, metrics: StepMetrics) -> Table | Text:
        """The numbers in columns; on a terminal too narrow for them as a text of a few lines."""
        table = Table(box=None, pad_edge=False)
        cells = self._cells(metrics)
        if self._evaluation is not None:
            metric = self._family.metric
            cells.insert(1, (metric.short, f"{self._evaluation[metric.key]:.4f}"))
        # Names break between words, numbers do not.
        widths = [max(map(len, [*name.split(), text])) + 2 for name, text in cells]
        if sum(widths) - 2 > self.console.width:
            return Text(", ".join(f"{name} {text}" for name, text in cells))
        for name, _ in cells:
            table.add_column(name, justify="right")
        table.add_row(*(text for _, text in cells))
        return table

    def _eta(self, metrics: StepMetrics) -> str:
        items_per_step = metrics.items / metrics.step
        left = (self._total - metrics.step) * items_per_step / max(self._rate, 1e-9)
        return f"{int(left) // 60}:{int(left) % 60:02d}"
