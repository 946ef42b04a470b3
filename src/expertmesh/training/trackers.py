"""Trackers of a run's metrics: its own files, TensorBoard, and trackers of the user."""

import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from expertmesh.config.output_file import naming
from expertmesh.errors import ConfigError, named
from expertmesh.training.expert_use import ExpertUse
from expertmesh.training.metrics import MetricsFile


class Tracker(Protocol):
    """Receiver of the metrics of a run, for example a client of a tracking service.

    Rank 0 calls it after every step; pass yours to `expertmesh.train(..., trackers=[mine])`.
    """

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Record one step.

        Args:
            values: values as in metrics.jsonl: "step" (from 1), "loss", "lr", ...; "eval_..." after an evaluation. NaN
                and infinity are possible in a diverged step.
        """


class OwnTracker(Tracker, Protocol):
    """Tracker that the run opens and closes."""

    def close(self) -> None:
        """Close the tracker at the end of the run."""


class AllTrackers:
    """Trackers of a run, called one after the other. `own`: trackers of the run, whose errors are raised at once."""

    def __init__(self, own: Sequence[Tracker], given: Sequence[Tracker]) -> None:
        self._own, self._given = own, given
        # first error of a user's tracker, raised after the run is saved; None: there was none
        self.error: Exception | None = None

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Record one step in each tracker."""
        for tracker in self._own:
            tracker.write(values, experts)
        for tracker in self._given:
            try:
                tracker.write(values, experts)
            except Exception as error:
                self.error = self.error or error

    def raise_error(self) -> None:
        """Raise the error of a user's tracker, if there was one."""
        if self.error is not None:
            raise self.error


class Files:
    """Tracker that writes metrics.jsonl and experts.jsonl of a run directory."""

    def __init__(self, metrics: MetricsFile, experts: MetricsFile) -> None:
        self._metrics, self._experts = metrics, experts

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Append the step to metrics.jsonl, and its use of experts, if given, to experts.jsonl."""
        self._metrics.write(dict(values))
        if experts is not None:
            self._experts.append({"step": values["step"], **experts.named()})

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._experts.close()


class TensorBoard:
    """Tracker that writes TensorBoard's event files."""

    def __init__(self, folder: Path, *, last_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder, self._hook = folder, threading.excepthook
        # an error of its thread is raised here, or by the next call
        threading.excepthook = self._unless_of_the_disk
        try:
            with naming(folder):
                self._writer: Any = SummaryWriter(str(folder), purge_step=last_step + 1)
        except BaseException:
            if not any(map(_is_tensorboards, threading.enumerate())):  # no thread is left that could fail
                threading.excepthook = self._hook
            raise

    def write(self, values: Mapping[str, float], experts: ExpertUse | None) -> None:
        """Write the numbers of a step as scalars."""
        step = int(values["step"])
        with naming(self._folder):
            for name, value in values.items():
                if name != "step":
                    group = "evaluation" if "eval" in name else "training"
                    self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        """Flush and close the files."""
        try:
            with naming(self._folder):
                self._writer.close()
        finally:
            threading.excepthook = self._hook

    def _unless_of_the_disk(self, failed: threading.ExceptHookArgs) -> None:
        if not (issubclass(failed.exc_type, OSError) and _is_tensorboards(failed.thread)):
            self._hook(failed)


def _is_tensorboards(thread: threading.Thread | None) -> bool:
    return "tensorboard" in type(thread).__module__


def open_tensorboard(
    folder: Path, *, last_step: int, make: Callable[..., OwnTracker] = TensorBoard
) -> list[OwnTracker]:
    """List with a TensorBoard tracker if TensorBoard is installed, else empty."""
    if importlib.util.find_spec("tensorboard") is None:
        return []
    try:
        return [make(folder, last_step=last_step)]
    except ImportError as error:
        raise ConfigError(
            "train.tensorboard",
            True,
            f"importing tensorboard failed: {error}",
            f"mend its installation, or use {named('train.tensorboard', False)}",
        ) from error
