"""Progress display of a training run: a live table on a terminal, plain lines elsewhere."""

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

from expertmesh.errors import printed
from expertmesh.models.family import Family, Metric
from expertmesh.training.evaluate import Evaluation
from expertmesh.training.metrics import StepMetrics

_PLAIN_LINES = 40
_NOBODY = (errno.EPIPE, errno.EIO)
"""Errors of a dead pipe, and of a closed terminal."""
_WIDE = 60
"""Terminal columns from which a bar is shown beside the numbers."""


class _Console(Console):
    """Console that raises BrokenPipeError on a dead pipe, where rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _to_stderr(text: str) -> None:
    """Write a line to standard error; errors are ignored."""
    with suppress(OSError, ValueError):
        os.write(sys.stderr.fileno(), f"{text}\n".encode())


class ProgressReport:
    """Shows steps and evaluations; a context manager. If its output fails, it falls silent after one message on
    standard error.

    Args:
        on_lost: called on a dead pipe or a closed terminal. A full disk does not call it.
    """

    def __init__(
        self,
        console: Console | None,  # output; None: standard output
        *,
        family: Family,  # model family, which names the items and the metric
        total_steps: int,  # number of steps of the run
        first_step: int,  # steps done before
        every: int | None = None,  # steps between plain lines; None: about forty lines in all
        metric: Metric | None = None,  # metric of the evaluations; None: the family's
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._family, self._metric = family, metric or family.metric
        self.console = console or _Console(highlight=False)
        self._on_lost = on_lost
        self._is_lost = False
        self._total, self._first = total_steps, first_step
        self._every = every or max(1, (total_steps - first_step) // _PLAIN_LINES)
        self._evaluation: Evaluation | None = None
        self._last: StepMetrics | None = None
        self._done = 0
        self._items, self._seconds = 0.0, 0.0  # exponential means over the last steps
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
        """Context that silences the report if its output fails. (rich ends the process on a dead pipe.)"""
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
            f"warning: standard output cannot be written ({error.strerror}); the run goes on without it, its numbers "
            "are in"
            " its metrics.jsonl"
        )

    def last_word(self, text: str) -> None:
        """Print a line that must be seen, with options as in `printed`: on standard error if standard output is
        lost."""
        text = printed(text)
        self.message(text)
        if self._is_lost:
            _to_stderr(text)

    def message(self, text: str) -> None:
        """Print one line."""
        with self._heard():
            self.console.print(text, markup=False, soft_wrap=True)

    def asked(self, number: signal.Signals) -> None:
        """Report a signal at once; may be called from a signal handler."""
        again = "; Ctrl-C again: now, without saving" if number == signal.SIGINT else ""
        text = f"{number.name}: stopping after this step, to save{again}"
        if self._live is not None:
            # rich's own thread draws it.
            shown = [] if self._shown is None else [self._shown]
            self._live.update(Group(*shown, Text(text)))
        elif not self.console.quiet:
            _to_stderr(text)  # not through the console: it may be writing just now

    def evaluation(self, step: int, result: Evaluation) -> None:
        """Show an evaluation after `step` steps."""
        self._evaluation = result
        metric = self._metric
        judged = f", {result[metric.key]:.4f} {metric.text}" if metric.key != "loss" else ""
        self.message(f"step {step}: validation loss {result['loss']:.4f}{judged}")
        if self._last is not None:
            self._draw(self._last)

    def step(self, metrics: StepMetrics) -> None:
        """Show a finished step."""
        count, self._done = metrics.items - self._done, metrics.items
        seconds = count / max(metrics.items_per_second, 1e-9)
        keep = 0.9 if metrics.step > self._first + 2 else 0.0  # the first step includes warm-up
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
        """Pairs of name and number, as texts."""
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
        """Numbers in columns; on a narrow terminal a text of a few lines."""
        table = Table(box=None, pad_edge=False)
        cells = self._cells(metrics)
        if self._evaluation is not None:
            metric = self._metric
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
