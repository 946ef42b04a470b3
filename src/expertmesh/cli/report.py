"""`expertmesh report RUN`: learning curve of a run, its metric against a baseline, and samples of models that generate
text."""

import math
from typing import TYPE_CHECKING, Annotated, Any

from expertmesh.cli.decoding import OnDevice, place_of, say_precision
from expertmesh.cli.parse import parsed
from expertmesh.cli.quantized_report import is_quantized, report_quantized
from expertmesh.cli.report_samples import measure, prompts_of, sample, shortened
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.config.base import expanded
from expertmesh.config.fields import Count, DataPlace, Each, Positive, Ratio, Spelling
from expertmesh.data.data_progress import notes_known
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.models.family import Family

if TYPE_CHECKING:
    from expertmesh.data.corpus import Corpus
    from expertmesh.models.task import Data, Task
    from expertmesh.reporting.page import Tokens
    from expertmesh.runs.open import LoadedModel
    from expertmesh.runs.run_dir import Run

_CURVE_ROWS = 12
_TOKENS = 64
"""Approximate tokens of a sample, for which the number of threads is chosen."""


class _Runs:
    """Runs of a call, shared by page and summary. Each run is looked up once; the model is kept in memory for a single
    run."""

    def __init__(
        self,
        family: str | None,  # model family outside this package, as module:name
        place: dict[str, Any],  # arguments of `open_model`
        data_path: tuple[str, ...] | None,  # where the data of the runs are now; None: where they were
        *,
        keeps_models: bool,  # whether opened models are kept in memory
    ) -> None:
        from expertmesh.models.registry import find_family

        self.family = None if family is None else find_family(family)
        self._place, self._data_path, self._keeps_models = place, data_path, keeps_models
        self._found: dict[str, Run | ConfigError | CheckpointError] = {}
        self._opened: dict[str, LoadedModel] = {}

    def open(self, name: str) -> "LoadedModel":
        """Model of a run."""
        from expertmesh.runs.open import open_model

        run = self._find(name)
        opened = self._opened.get(name) or open_model(run, **self._place)
        if self._keeps_models:
            self._opened[name] = opened
        return opened

    def sample(self, name: Any) -> "Tokens":
        """Sample of a run for the page; raises the errors of `open`."""
        from expertmesh.reporting.sample import sample_of_run

        run = self._find(str(name))
        return sample_of_run(self.open(str(name))) if run.family.generates_text else []

    def _find(self, name: str) -> "Run":
        from expertmesh.runs.data_paths import with_data
        from expertmesh.runs.run_dir import load_run

        if name not in self._found:
            try:
                self._found[name] = with_data(load_run(name, self.family), self._data_path)
            except (ConfigError, CheckpointError) as error:
                self._found[name] = error
        found = self._found[name]
        if isinstance(found, ConfigError | CheckpointError):
            raise found
        return found


class ReportVerb(OnDevice):
    """Summarizes a run: learning curve, evaluation against a baseline (texts: byte trigrams; images: nearest
    neighbours), and samples.

    examples:
      expertmesh report runs/gpt-moe-demo
      expertmesh report runs/one runs/two --page compared.html

    exit code: 0; 1 with --check unless the model is better than the baseline; 2 for invalid input
    """

    run: Annotated[tuple[str, ...], Spelling("RUN", also=("run", "run_dir"), is_word=True)]
    """run directories; several are compared"""
    page: Annotated[str | None, Spelling("FILE")] = None
    """HTML page to write (default: report.html in the first run's directory)"""
    family: Annotated[str | None, Spelling("MODULE:NAME")] = None
    """your own model family as module:name (default: the run's)"""
    samples: Count = 8
    """number of continuations to sample"""
    prompt: Annotated[tuple[str, ...], Each] = ()
    """prompt to sample from; may be repeated (default: openings of validation texts)"""
    tokens: Positive = 100
    """number of tokens to generate per sample"""
    temperature: Ratio = 0.7
    """sampling temperature; 0: greedy"""
    seed: int = 0
    """random seed"""
    check: bool = False
    """exit with code 1 unless the model is better than the baseline"""
    data: DataPlace = DataPlace()


def run(argv: list[str]) -> int:
    """Run the verb. Returns 0; with `--check` 1, unless the model is better than its family's baseline."""
    options = parsed(ReportVerb, argv)
    quantized = [name for name in options.run if is_quantized(name)]
    others = tuple(name for name in options.run if name not in quantized)
    options = options.model_copy(update={"run": others})
    with told_of_data():
        for name in quantized:
            report_quantized(expanded(name))
        if not options.run:
            return 0
        with loading():
            runs = _Runs(
                options.family,
                place_of(options),
                options.data.path,
                keeps_models=len(options.run) == 1,
            )
            told = _write_page(options, runs)  # first: runs without a checkpoint have a page as well
        print(told)
        return max([_report(options, runs, run) for run in options.run])


def _write_page(options: ReportVerb, runs: _Runs) -> str:
    """Write the page; returns a line with its path, or with the reason why there is none."""
    from expertmesh.reporting.page import find_plotly, write_page

    try:
        find_plotly()
    except ConfigError as error:
        if options.page is not None:
            raise
        return f"no page: {error}"
    return f"page: {write_page(options.run, options.page, sample=runs.sample)}"


def _report(options: ReportVerb, runs: _Runs, run: str) -> int:
    from expertmesh.checkpoints.store import list_checkpoints
    from expertmesh.runs.run_dir import RunDir
    from expertmesh.training.metrics import read_metrics
    from expertmesh.training.state import read_run_state
    from expertmesh.training.threads import threads_of_calls

    if len(options.run) > 1:
        print(f"\n=== {run}")
    folder = RunDir(run)
    try:
        opened = runs.open(run)
    except CheckpointError as error:
        # Without a checkpoint only the learning curve can be shown.
        metrics = read_metrics(folder.metrics)
        if metrics:
            print(curve_table(metrics, folder.read_config(runs.family)[1]))
        if not metrics or list_checkpoints(folder.checkpoints):
            raise
        print(f"\nnot judged, and no samples: {error}")
        return 1 if options.check else 0
    found, task = opened.run, opened.task
    family, metrics = found.family, read_metrics(folder.metrics)
    print(curve_table(metrics, family))
    saved = read_run_state(found.checkpoint)
    step = saved["step"]
    print(f"\nthe newest checkpoint is of step {step:,}")
    data, missing = _find_data(found, task, saved["data_key"])
    is_better = _print_measures(opened, data, metrics, step)
    if missing is not None:
        print(f"not judged beside a baseline: {missing}")
    if family.generates_text:
        corpus: Corpus | None = getattr(data, "corpus", None)
        room = opened.decoder.max_seq_len // 2
        own = [shortened(p, opened.text.tokenizer, room) for p in prompts_of(corpus, options.samples)]
        with (
            threads_of_calls(opened.model, opened.precision, num_rows=max(options.samples, 1)),
            opened.precision.autocast(),
        ):
            samples = sample(
                opened,
                prompts=options.prompt or own,
                num_tokens=options.tokens,
                temperature=options.temperature,
                seed=options.seed,
            )
        say_precision(opened.precision)  # nothing is refused any more
        for number, sampled in enumerate(samples, 1):
            print(f"\n--- sample {number}, prompt {sampled.prompt!r}")
            print(sampled.prompt + sampled.text)
        if samples:
            print(f"\n{measure(samples, corpus)}")
    else:
        say_precision(opened.precision)
    return 1 if options.check and is_better is not True else 0


def _find_data(found: "Run", task: "Task", key: str) -> "tuple[Data | None, str | None]":
    """Data of the run with a given key, or the reason why they are unavailable (moved or changed)."""
    from expertmesh.training.state import check_same_data

    if not key:
        return None, "the run came from elsewhere, without the data that it was trained on"
    try:
        with notes_known():
            data = task.prepare()
        check_same_data(key, data, where=found.checkpoint)
    except ConfigError as error:
        return None, str(error)
    return data, None


def _print_measures(
    opened: "LoadedModel",
    data: "Data | None",
    metrics: list[dict[str, Any]],
    step: int,
) -> bool | None:
    """Print the trainer's metric on its sample of the validation data, and the metric on all of them with the
    baseline's.

    Returns:
        Whether the model is better than the baseline; None: unknown.
    """
    from expertmesh.models.task import Begin
    from expertmesh.parallel.ranks import Ranks
    from expertmesh.training.evaluate import evaluate, watched
    from expertmesh.training.metrics import evaluations
    from expertmesh.training.threads import threads_of_calls

    metric = opened.task.metric or opened.run.family.metric
    config = opened.run.config
    rows = []
    if before := evaluations(metrics, "initial_eval_"):
        rows.append(("on the trainer's sample, before training", before[0].get(metric.key)))
    of_step = [line for line in metrics if line["step"] == step]
    if then := evaluations(of_step):
        rows.append((f"on the trainer's sample, after step {step:,}", then[-1].get(metric.key)))
    after = baseline = None
    if data is not None:
        opened.task.begin(opened.model, data, Begin(step, opened.run.path, Ranks()))
        size = config.train.samples_per_pass
        num_rows = _TOKENS * size
        with threads_of_calls(opened.model, opened.precision, num_rows=num_rows):
            result = evaluate(
                opened.task,
                opened.model,
                data,
                batch_size=size,
                max_samples=None,
                precision=opened.precision,
                watch=watched(data),
            )
        after, baseline = result[metric.key], opened.task.baseline(data)
        rows.append((f"on all validation data, after step {step:,}", after))
    if baseline is not None:
        rows.append((f"{baseline.name}, on all validation data", baseline.value))
    width = max((len(name) for name, _ in rows), default=0)
    if rows:
        print(f"validation {metric.text}")
    for name, value in rows:
        print(f"  {name:<{width}}  {_number(value)}")
    if after is None or baseline is None:
        return None
    is_better = after > baseline.value if metric.higher_is_better else after < baseline.value
    print(f"the model is {'' if is_better else 'NOT '}better than the {baseline.short}")
    return is_better


def curve_table(metrics: list[dict[str, Any]], family: Family) -> str:
    """Table of selected steps of the learning curve; rows with an evaluation are preferred."""
    if not metrics:
        return "no metrics"
    evaluated = [m for m in metrics if "eval_loss" in m]
    rows = evaluated or metrics
    stride = -(-len(rows) // _CURVE_ROWS)
    chosen = [m for i, m in enumerate(rows) if (len(rows) - 1 - i) % stride == 0]
    if chosen[0] is not metrics[0]:
        chosen.insert(0, metrics[0])
    if chosen[-1] is not metrics[-1]:
        chosen.append(metrics[-1])
    evaluated_names = {name.removeprefix("eval_"): 0.0 for line in evaluated for name in line}
    items, metric = family.items, family.metric_of(evaluated_names or None)
    has_experts = any("load_imbalance" in m for m in metrics)
    head = f"{'step':>8} {items:>12} {'loss':>8} {metric.short:>10} {items + '/s':>9}"
    lines = [head + f" {'imbalance':>9}" * has_experts]
    for m in chosen:
        key = f"eval_{metric.key}"
        lines.append(
            f"{m['step']:>8,} {_count(m, items):>12} {_number(m['loss']):>8} {_number(m[key]) if key in m else '':>10}"
            f" {_count(m, f'{items}_per_second'):>9}" + f" {_number(m.get('load_imbalance'), 2):>9}" * has_experts
        )
    if skipped := metrics[-1].get("skipped_steps"):
        lines.append(f"{skipped:,} steps were skipped: a loss or gradient was not finite")
    return "\n".join(lines)


def _count(line: dict[str, Any], name: str) -> str:
    """Whole number of a metrics file as text; "" if it is missing."""
    value = line.get(name)
    return "" if value is None or not math.isfinite(value) else f"{value:,.0f}"


def _number(value: float | None, places: int = 4) -> str:
    """Number of a metrics file as text; null stands for a non-finite number."""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.{places}f}"
