"""Training loop of all model families: data, steps, evaluations, checkpoints, and a clean stop."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from expertmesh.checkpoints.store import list_checkpoints, newest_good, step_of
from expertmesh.comm.bind import bound_to
from expertmesh.config.run import RunConfig
from expertmesh.errors import TrainingDivergedError, named
from expertmesh.models.bound_files import check_files, hashes_in
from expertmesh.models.family import Family, Metric
from expertmesh.models.task import Batch, Begin
from expertmesh.training.ends import EarlyEnd
from expertmesh.training.evaluate import Evaluation, evaluate
from expertmesh.training.heap import HeapTrim
from expertmesh.training.init_from import kept_files, load_base, load_start
from expertmesh.training.kept_samples import Sampler, kept_samples
from expertmesh.training.lost_rows import lost_rows
from expertmesh.training.metrics import MetricsFile, StepMetrics, evaluations, read_metrics
from expertmesh.training.named_trackers import open_trackers
from expertmesh.training.optim import (
    decay_start,
    learning_rate,
    set_learning_rate,
)
from expertmesh.training.pace import Pace
from expertmesh.training.param_groups import summary
from expertmesh.training.progress import ProgressReport
from expertmesh.training.run_plan import RunPlan, check, open_run, resolve
from expertmesh.training.state import (
    check_same_data,
    check_same_run,
    read_run_state,
)
from expertmesh.training.step import StepResult, training_step
from expertmesh.training.stop import StopRequest
from expertmesh.training.trackers import AllTrackers, Files, OwnTracker, Tracker
from expertmesh.training.what_learns import counts_of_parts, learning_lines


class _LeftOutError(Exception):
    """Raised in an evaluation when a rank was asked to stop."""


@dataclass(frozen=True)
class TrainResult:
    """Result of a call of `train`.

    Attributes:
        ended_early: option that ended the call before its last step, or None: "max_time" (the run can be resumed) or
            "patience" (it is finished).
    """

    run_dir: Path
    step: int  # number of optimizer steps done in all
    items: int  # tokens, or the family's unit, trained on in all
    seconds: float  # wall time of all steps, without evaluations and saves
    resumed_from: int  # number of steps done before this call
    initial_evaluation: Evaluation | None  # evaluation before the first step; None if missing in metrics.jsonl
    evaluation: Evaluation | None  # last evaluation; None if there was none yet
    skipped_steps: int  # steps whose update was skipped
    stopped_by: signal.Signals | None  # signal that ended the call early, or None
    checkpoint: Path | None  # newest checkpoint, or None
    is_leader: bool = True  # whether this process is rank 0
    evaluated_at: int | None = None  # step of `evaluation`, or None; a run that was stopped may have ended later
    ended_early: EarlyEnd | None = None
    metric: Metric | None = None  # metric of the run's evaluations; None: the family's


def train(
    config: RunConfig,
    *,
    recipe: str = "none",
    family: Family | None = None,
    console: Console | None = None,
    trackers: Sequence[Tracker] = (),
    sampler: Sampler | None = None,
) -> TrainResult:
    """Train, or resume training, in `config.train.run_dir`.

    After SIGTERM, SIGHUP, Ctrl-C or a dead pipe the current step is finished, evaluation is skipped, a checkpoint is
    saved, and the call returns. On CPU the losses depend on the configuration only: stopping and resuming changes no
    bit.

    Args:
        config: configuration of the run; with train.init_from its model and tokenizer are replaced by the other run's.
        recipe: name of the recipe, kept with the run.
        family: model family; None: the family in the configuration.
        console: output of progress; None: standard output.
        trackers: additional trackers; rank 0 writes to them, and does not close them. An error of one is raised after a
            checkpoint is saved.
        sampler: writes the samples of `train.sample_every`.

    Returns:
        Result of the call.

    Raises:
        ConfigError: the configuration does not fit this machine, the data, or the existing run.
        CheckpointError: all checkpoints to resume from, or of train.init_from, are damaged.
        TrainingDivergedError: too many steps in a row were not finite.
        OSError: the disk is full, or cannot be written. Earlier checkpoints are unchanged.
    """
    with ExitStack() as stack:
        plan = resolve(config, recipe=recipe, family=family, sampler=sampler)
        check(plan, stack)
        open_run(plan, stack)
        return _run(plan, stack, console, trackers)


def _run(plan: RunPlan, stack: ExitStack, console: Console | None, trackers: Sequence[Tracker]) -> TrainResult:
    """Resume, run all remaining steps, and sum up."""
    trainer = plan.ranks.on_all(lambda: _Trainer(plan))
    stop = stack.enter_context(StopRequest())
    resumed_from = trainer.resume()
    plan.ranks.on_rank0(trainer.describe)
    trainer.run(stop, console, stack, trackers)
    return trainer.result(resumed_from, stop)


class _Trainer:
    """State of one call of `train`."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.family, self.task, self.ranks = plan.family, plan.task, plan.ranks
        self.config, self.run_dir = plan.config, plan.run_dir
        self.data, self.precision, self.threads = plan.data, plan.precision, plan.threads
        self.state, self.store, self.ends = plan.state, plan.store, plan.ends
        self.ended_early: EarlyEnd | None = None
        self.heap = HeapTrim()
        self.pace = Pace(has_gpu=plan.precision.device.type != "cpu", num_ranks=plan.ranks.size)
        self.hashes: dict[str, str] = {}
        self.trackers = AllTrackers((), ())
        self.saved_step: int | None = None
        self.evaluated: Evaluation | None = None
        self.evaluated_step = -1

    def resume(self) -> int:
        """Load the newest good checkpoint, the trunk's checkpoint, or initial weights; returns the number of steps
        done."""
        if self.ranks.is_leader:
            self.store.remove_leftovers()
        trunk = self.plan.trunk
        path = newest_good(self.run_dir.checkpoints, self.ranks) or trunk
        if self.plan.begin is not None:
            load_base(self.plan.begin, self.task, self.state, self.data)
        if path is None:
            if self.plan.begin is not None:
                load_start(self.plan.begin, self.task, self.state, self.data)
            return 0
        values = read_run_state(path)
        self.ranks.on_rank0(lambda: check_same_run(values["config"], self.config, family=self.family, where=path))
        self.ranks.on_rank0(lambda: check_same_data(values["data_key"], self.data, where=path))
        self.ranks.on_rank0(lambda: check_files(self.data.files, values, self.family, where=path))
        self.ranks.on_all(lambda: self.state.load(path))
        if path != trunk:
            self.saved_step = self.state.progress.step
        return self.state.progress.step

    def describe(self) -> None:
        """Write what the run is, and note the files that belong to its checkpoints; on rank 0."""
        goes_on = self.saved_step is not None
        files = self.data.files if goes_on else kept_files(self.config, self.data)
        self.run_dir.write_description(self.config, recipe=self.plan.recipe, files=files)
        self.hashes = hashes_in(self.run_dir.path, self.family)

    def run(
        self,
        stop: StopRequest,
        console: Console | None,
        stack: ExitStack,
        given: Sequence[Tracker] = (),
    ) -> None:
        """Run all remaining steps."""
        config, progress = self.config, self.state.progress
        first = progress.step
        lost, own = "", list[OwnTracker]()
        console = console if self.ranks.is_leader else Console(quiet=True)
        report = ProgressReport(
            console,
            family=self.family,
            total_steps=config.train.steps,
            first_step=first,
            every=config.train.log_every,
            metric=self.task.metric,
            on_lost=lambda: stop.ask(signal.SIGPIPE),
        )
        if self.ranks.is_leader:
            lost = self._lost_rows(first)
            files = [MetricsFile(p, last_step=first) for p in self.run_dir.records]
            own.append(Files(*files))
            if first < config.train.steps:
                own += open_trackers(
                    config.train.trackers,
                    self.run_dir.path,
                    config.model_dump(mode="json"),
                    tensorboard=config.train.tensorboard,
                    last_step=first,
                    say=report.last_word,
                )
            for tracker in own:
                stack.callback(tracker.close)
            self.trackers = AllTrackers(own, given)
        if first >= config.train.steps:
            return
        stack.enter_context(report)
        stop.on_ask = report.asked
        report.message(self._description(first))
        report.message(summary(self.state.model, muon=config.optim.name == "muon"))
        if config.train.init_from is not None:
            for line in learning_lines(self.family, self.task, self.state, self.precision):
                report.message(line)
        for told in (lost, self.state.loaded):
            if told:
                report.message(told)
        self.ends.heard(self.ranks.on_rank0(lambda: self._losses_until(first)))
        with self.precision.autocast():
            begin = Begin(first, self.run_dir.path, self.ranks)
            self.task.begin(self.state.model, self.data, begin)
        extra: dict[str, float] = {}
        if first == 0 and (before := self._evaluate(stop, report)) is not None:
            extra = {f"initial_eval_{name}": value for name, value in before.items()}
        self.heap.before_steps()
        while progress.step < config.train.steps and not self._must_end(stop):
            self._one_step(report, extra, stop)
            extra = {}
        if progress.step >= config.train.steps and stop.signal == signal.SIGPIPE:
            stop.signal = None  # all steps were done already
        if progress.step < config.train.steps:
            self._name_end(stop)
        if self.saved_step != progress.step and progress.bad_steps_in_row == 0:
            self._save(self.evaluated if self.evaluated_step == progress.step else None)
        self.store.wait()
        self.ranks.on_rank0(self.trackers.raise_error)
        self._say_end(stop, report, first)

    def _must_end(self, stop: StopRequest) -> bool:
        """Whether a rank was asked to stop, a user's tracker failed, time is up, or evaluations have stopped improving;
        every rank must call."""
        if self.ends.has_no_patience():
            return True
        ends_here = stop.signal is not None or self.trackers.error is not None
        return self.ranks.any(ends_here or self.ends.is_late())

    def _name_end(self, stop: StopRequest) -> None:
        """Record why the run ended before its last step; every rank must call."""
        if self.ranks.any(stop.signal is not None):
            stop.signal = stop.signal or signal.SIGTERM  # another rank was asked
        else:
            self.ended_early = "patience" if self.ends.has_no_patience() else "max_time"

    def _losses_until(self, step: int) -> list[float]:
        """Validation losses up to a step, in order."""
        lines = [line for line in read_metrics(self.run_dir.metrics) if line["step"] <= step]
        first = evaluations(lines, "initial_eval_")[:1]
        return [self.ends.badness(one) for one in (*first, *evaluations(lines)) if "loss" in one]

    def _say_end(self, stop: StopRequest, report: ProgressReport, first: int) -> None:
        """Report why the run stopped, and non-finite last steps, which are not saved."""
        config, progress, paths = self.config.train, self.state.progress, self._checkpoints()
        bad = progress.bad_steps_in_row
        kept = f"the newest checkpoint is {paths[-1]}" if paths else "there is no checkpoint"
        if stop.signal is None and bad and (bad >= progress.step - first or not paths):
            raise TrainingDivergedError(
                f"step {progress.step}: the last {bad} of {progress.step - first} steps had a non-finite loss or "
                f"gradient and changed nothing; {kept}; lower {named('optim.lr')} or the initial weights "
                f"({named('model.init_std')}), or use {named('train.dtype', 'float32')}"
            )
        saved = f"saved in {self.store.folder}"
        if bad:
            saved = f"the last {bad} steps were not finite and are not saved, {kept}"
        if stop.signal is not None:
            report.last_word(
                f"stopped by {stop.signal.name} after step {progress.step}, {saved};"
                f" continue with {named('train.resume', 'auto')}"
            )
        elif self.ended_early == "max_time":
            report.last_word(
                f"stopped after step {progress.step}: {config.max_time:g} s of train.max_time are used up, {saved}; "
                "continue with"
                f" {named('train.resume', 'auto')}"
            )
        elif self.ended_early == "patience":
            count = "an evaluation" if config.patience == 1 else f"{config.patience} evaluations in a row"
            report.last_word(f"done after step {progress.step}: {count} had no {self.ends.best_text}, {saved}")
        elif bad:
            report.last_word(saved)

    def _one_step(
        self,
        report: ProgressReport,
        extra: dict[str, float],
        stop: StopRequest,
    ) -> None:
        """Run an optimizer step, and the evaluation, metrics and checkpoint that are due after it."""
        config, progress = self.config.train, self.state.progress
        began = time.perf_counter()
        self.pace.begin()
        lr = learning_rate(progress.step, total_steps=self.config.total_schedule_steps, config=self.config.optim)
        result = self._update(lr)
        seconds = time.perf_counter() - began
        progress.seconds += seconds
        self.ends.stepped(seconds)
        line = StepMetrics(
            step=progress.step,
            loss=result.loss,
            aux_loss=result.aux_loss,
            z_loss=result.z_loss,
            grad_norm=result.grad_norm,
            lr=lr,
            items_per_second=result.items / seconds,
            load=result.load,
            skipped_steps=progress.skipped_steps,
            items=progress.items,
        )
        report.step(line)
        self.heap.after_step()
        if (slow := self.pace.end(seconds)) is not None:
            report.message(f"step {progress.step} {slow}")
        evaluation = None
        if self._is_due(config.eval_every):
            evaluation = self._evaluate(stop, report)
            extra |= {f"eval_{name}": value for name, value in (evaluation or {}).items()}
            self.heap.before_steps()
        if self._is_due(config.sample_every):
            assert self.plan.sampler is not None
            found = self.plan.sampler(self.task, self.state.model, self.data, self.precision)
            for text in kept_samples(found, self.run_dir.samples, step=progress.step):
                report.message(text)
        values = {**line.named(self.family.items), **result.measures, **extra}
        self.trackers.write(values, result.experts)
        self._check_divergence()
        self.store.check()
        if self._is_due(config.checkpoint_every) and progress.bad_steps_in_row == 0:
            self._save(evaluation)

    def _is_due(self, every: int | None) -> bool:
        """Whether what is done in every so many steps, and in the last one, is due after this one; None: never done."""
        step = self.state.progress.step
        return every is not None and (step % every == 0 or step == self.config.train.steps)

    def _update(self, lr: float) -> StepResult:
        state, progress = self.state, self.state.progress
        batch_size = self.config.train.batch_size
        set_learning_rate(state.optimizer, lr)
        batch = self.data.batch(progress.samples, batch_size)
        result = training_step(
            self.task,
            state.model,
            state.optimizer,
            state.scaler,
            batch,
            step=progress.step,
            precision=self.precision,
            ranks=self.ranks,
        )
        progress.step += 1
        progress.samples += batch_size
        progress.items += result.items
        progress.bad_steps_in_row = 0 if result.is_finite else progress.bad_steps_in_row + 1
        progress.skipped_steps += not result.is_finite
        return result

    def _check_divergence(self) -> None:
        progress = self.state.progress
        if progress.bad_steps_in_row < self.config.train.max_bad_steps:
            return
        self.store.wait()
        paths = self._checkpoints()
        good = f"the last good checkpoint is {paths[-1]}" if paths else "no checkpoint was saved"
        raise TrainingDivergedError(
            f"step {progress.step}: {progress.bad_steps_in_row} steps in a row had a non-finite loss or gradient; "
            f"{good}; lower {named('optim.lr')} or use {named('train.dtype', 'float32')}"
        )

    def _evaluate(self, stop: StopRequest, report: ProgressReport) -> Evaluation | None:
        """Evaluate and report; None: a rank was asked to stop meanwhile, and the evaluation was skipped."""
        config, step = self.config.train, self.state.progress.step

        def until_asked(batches: Iterator[Batch]) -> Iterator[Batch]:
            for batch in batches:
                if self.ranks.any(stop.signal is not None or self.ends.is_late()):
                    raise _LeftOutError
                yield batch

        try:
            found = evaluate(
                self.task,
                self.state.model,
                self.data,
                batch_size=config.samples_per_pass,
                max_samples=config.eval_batches * config.batch_size,
                precision=self.precision,
                ranks=self.ranks,
                watch=until_asked,
            )
        except _LeftOutError:
            report.message(f"step {step}: the evaluation is left out")
            return None
        report.evaluation(step, found)
        self.ends.heard([self.ends.badness(found)])
        self.evaluated, self.evaluated_step = found, step
        return found

    def _lost_rows(self, first: int) -> str:
        config, begin = self.config, 0
        if config.train.branch_from is not None:
            begin = decay_start(total_steps=config.total_schedule_steps, config=config.optim)
        return lost_rows(*self.run_dir.records, first=begin, last=first)

    def _save(self, evaluation: Evaluation | None) -> None:
        progress, began = self.state.progress, time.monotonic()
        self.store.save(
            progress.step,
            self.state.tensors(),
            self.state.values(self.config, recipe=self.plan.recipe, data_key=self.data.key, files=self.hashes),
            eval_loss=None if evaluation is None else self.ends.badness(evaluation),
        )
        self.saved_step = progress.step
        if self.ends.waits_for_save:
            self.store.wait()
            self.ends.saved(time.monotonic() - began)

    def _checkpoints(self) -> list[Path]:
        """Checkpoints of the run, oldest first, without damaged ones of later steps."""
        paths = list_checkpoints(self.run_dir.checkpoints)
        return [path for path in paths if step_of(path) <= self.state.progress.step]

    def _description(self, first: int) -> str:
        parameters = sum(one.total() for one in counts_of_parts(self.state.model))
        start = f"resuming after step {first}" if first else "starting"
        if first and self.saved_step is None:
            start = f"leaving the trunk {self.config.train.branch_from} after step {first}"
        return (
            f"{start}: {self.plan.recipe}, {parameters:,} parameters, {self.precision.description}"
            f"{self._ranks()}; {self.data.description}; run directory {self.run_dir.path}"
        )

    def _ranks(self) -> str:
        if self.ranks.size > 1:
            count = torch.get_num_threads()
            why = "" if self.threads is None else f" ({self.threads.why})"
            return f", {self.ranks.size} ranks of {count} thread{'s' if count > 1 else ''}{why}{bound_to()}"
        return "" if self.threads is None else f", {self.threads.description}"

    def result(self, resumed_from: int, stop: StopRequest) -> TrainResult:
        """Result of the call."""
        progress = self.state.progress
        lines = read_metrics(self.run_dir.metrics)
        initial, evaluated = evaluations(lines, "initial_eval_"), evaluations(lines, "eval_")
        paths = self._checkpoints()
        return TrainResult(
            run_dir=self.run_dir.path,
            step=progress.step,
            items=progress.items,
            seconds=progress.seconds,
            resumed_from=resumed_from,
            initial_evaluation=initial[0] if initial else None,
            evaluation=evaluated[-1] if evaluated else None,
            skipped_steps=progress.skipped_steps,
            stopped_by=stop.signal,
            checkpoint=paths[-1] if paths else None,
            is_leader=self.ranks.is_leader,
            ended_early=self.ended_early,
            metric=self.task.metric,
            evaluated_at=max((n["step"] for n in lines if "eval_loss" in n), default=None),
        )
