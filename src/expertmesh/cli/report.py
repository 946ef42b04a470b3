"""`expertmesh report --run DIR`: what a run learned, against a baseline, and samples of models that generate text.

The share of sampled lines that tokenise follows one rule: every line of a continuation is stripped and given on its own
to Python's `tokenize`; it counts if that neither raises nor finds an error token. Empty lines do not count, nor does the
last line of a continuation that was cut off at its length.
"""

import io
import tokenize
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from expertmesh.cli.flags import OptionParser
from expertmesh.config.family import GPT, Family
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from expertmesh.models.family import Baseline, Task
    from expertmesh.training.run_dir import Run

_PROMPTS = (
    "import os\nimport sys\n",
    "def main(",
    "class Test",
    "    def __init__(self",
    "if __name__ ==",
    "for i in range(",
    "    return ",
    "try:\n    ",
)
_CURVE_ROWS = 12


@dataclass(frozen=True)
class Sample:
    """One continuation.

    Attributes:
        prompt: what the model was given.
        text: what it went on with.
        is_cut: whether it ended at its length, not at the end of the text.
    """

    prompt: str
    text: str
    is_cut: bool


def run(argv: list[str]) -> int:
    """Runs the verb.

    Args:
        argv: words after `report`.

    Returns:
        0 if the model is better than its family's baseline, or there is none, else 1.

    Raises:
        ConfigError: a value breaks a rule, or the run's data are not there any more.
        CheckpointError: the run has no usable checkpoint.
    """
    parser = OptionParser(prog="expertmesh report", description="Summarises a run.")
    parser.add_argument(
        "--run", required=True, action="append", help="run directory; several are compared"
    )
    parser.add_argument(
        "--page", metavar="FILE", help="the HTML page (report.html in the first run's directory)"
    )
    parser.add_argument("--family", help="of a run of your own family: module:name")
    parser.add_argument("--samples", type=int, default=8, help="continuations to sample (8)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens for each (100)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (0.7)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (0)")
    options = parser.parse_args(argv)
    if options.samples < 0 or options.tokens < 1 or not 0 <= options.temperature < float("inf"):
        raise ConfigError(
            f"--samples {options.samples} --tokens {options.tokens} --temperature {options.temperature}: "
            "must be at least 0, 1 and 0; change them"
        )
    _write_page(options)  # first, for runs without a checkpoint have one, too
    return max([_report(options, run) for run in options.run])


def _write_page(options: Any) -> None:
    """The page, or one line that says why there is none: the summary was the answer."""
    from expertmesh.reporting.page import find_plotly, report

    try:
        find_plotly()
    except ConfigError as error:
        if options.page is not None:
            raise
        print(f"no page: {error}")
        return
    print(f"page: {report(*options.run, page=options.page)}")


def _report(options: Any, run: str) -> int:
    from expertmesh.config.family import find_family
    from expertmesh.training.metrics import evaluations, read_metrics
    from expertmesh.training.run_dir import RunDir, load_run

    found = load_run(run, None if options.family is None else find_family(options.family))
    family, metric = found.family, found.family.metric
    metrics = read_metrics(RunDir(run).metrics)
    task: Task = family.open_task(found.config)
    model = _load_model(found, task)
    print(curve_table(metrics, family))
    before = evaluations(metrics, "initial_eval_")
    after, baseline = _judge(found, task, model)
    steps = f"after step {metrics[-1]['step']:,}" if metrics else "now"
    print()
    if before:
        print(f"validation {metric.text}, before training    {before[0][metric.key]:.4f}")
    print(f"validation {metric.text}, {steps:<18} {after:.4f}")
    if baseline is not None:
        print(f"{baseline.name:<44} {baseline.value:.4f}")
    if family.generates_text:
        samples = sample(
            task.decoder(model),
            found,
            count=options.samples,
            num_tokens=options.tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
        _print_samples(samples)
    if baseline is None:
        return 0
    is_better = after > baseline.value if metric.higher_is_better else after < baseline.value
    print(f"the model is {'' if is_better else 'NOT '}better than the {baseline.short}")
    return 0 if is_better else 1


def _load_model(found: "Run", task: "Task") -> "nn.Module":
    from expertmesh.training.precision import resolve_precision
    from expertmesh.training.state import load_weights

    precision = resolve_precision(found.config.train, record=found.arithmetic)
    model = task.build(device=precision.device, dtype=precision.master_dtype)
    load_weights(found.checkpoint, model)
    return model


def _judge(found: "Run", task: "Task", model: "nn.Module") -> tuple[float, "Baseline | None"]:
    """The family's metric of the model, and the baseline, on all of the validation data."""
    from expertmesh.training.checkpoint import read_state
    from expertmesh.training.evaluate import evaluate
    from expertmesh.training.precision import resolve_precision
    from expertmesh.training.state import check_same_data

    config = found.config
    data = task.prepare()
    check_same_data(read_state(found.checkpoint)["data_key"], data, where=found.checkpoint)
    result = evaluate(
        task,
        model,
        data,
        batch_size=config.train.micro_batch_size or config.train.batch_size,
        max_samples=None,
        precision=resolve_precision(config.train, record=found.arithmetic),
    )
    return result[found.family.metric.key], task.baseline(data)


def sample(
    model: Any, found: "Run", *, count: int, num_tokens: int, temperature: float, seed: int
) -> list[Sample]:
    """Continuations of fixed prompts, each from the beginning of a text.

    Args:
        model: the model.
        found: its run.
        count: how many; prompts repeat after the last.
        num_tokens: most tokens for each.
        temperature: 0: the most likely token always.
        seed: of the random numbers.
    """
    from expertmesh.data.tokenizer import END_OF_TEXT_ID, load_tokenizer
    from expertmesh.infer.engine import generate_batch
    from expertmesh.infer.sampling import Sampling

    if count == 0:
        return []
    tokenizer = load_tokenizer(found.path / "tokenizer.json")
    sampling = Sampling(temperature=temperature, top_p=0.95, seed=seed)
    prompts = [_PROMPTS[i % len(_PROMPTS)] for i in range(count)]
    prompt_ids = [[END_OF_TEXT_ID, *tokenizer.encode(p).ids] for p in prompts]
    room = model.max_seq_len - max(map(len, prompt_ids))
    outputs: list[list[int]] = [[] for _ in prompts]
    is_cut = [True] * count
    steps = generate_batch(
        model,
        prompt_ids,
        max_new_tokens=min(num_tokens, room),
        sampling=sampling,
        eos_id=END_OF_TEXT_ID,
    )
    for step in steps:
        for i, token_id in enumerate(step):
            if token_id is None:
                is_cut[i] = False
            else:
                outputs[i].append(token_id)
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in outputs]
    return [Sample(p, t, c) for p, t, c in zip(prompts, texts, is_cut, strict=True)]


def countable_lines(sampled: Sample) -> list[str]:
    """The stripped lines of prompt and continuation that the rule in this module's docstring looks at.

    Lines that hold nothing but prompt are left out.
    """
    lines = (sampled.prompt + sampled.text).split("\n")
    first = sampled.prompt.count("\n")
    chosen = lines[first : len(lines) - 1 if sampled.is_cut else len(lines)]
    return [line.strip() for line in chosen if line.strip()]


def tokenises(line: str) -> bool:
    """Whether Python's `tokenize` takes a line on its own."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(line + "\n").readline))
    except (tokenize.TokenError, SyntaxError):
        return False
    return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def curve_table(metrics: list[dict[str, Any]], family: Family = GPT) -> str:
    """Some steps of the learning curve as a table; the rows with an evaluation first of all."""
    if not metrics:
        return "no metrics"
    evaluated = [m for m in metrics if "eval_loss" in m]
    rows = evaluated or metrics
    stride = -(-len(rows) // _CURVE_ROWS)
    chosen = [m for i, m in enumerate(rows) if (len(rows) - 1 - i) % stride == 0]
    if chosen[0] is not metrics[0]:
        chosen.insert(0, metrics[0])
    items, metric = family.items, family.metric
    head = (
        f"{'step':>8} {items:>12} {'loss':>8} {metric.short:>10} {items + '/s':>9} {'imbalance':>9}"
    )
    lines = [head]
    for m in chosen:
        value = f"{m[f'eval_{metric.key}']:.4f}" if f"eval_{metric.key}" in m else ""
        lines.append(
            f"{m['step']:>8,} {m[items]:>12,} {m['loss']:>8.4f} {value:>10} {m[f'{items}_per_second']:>9,.0f}"
            f" {m['load_imbalance']:>9.2f}"
        )
    return "\n".join(lines)


def _print_samples(samples: list[Sample]) -> None:
    for number, sampled in enumerate(samples, 1):
        print(f"\n--- sample {number}, prompt {sampled.prompt!r}")
        print(sampled.prompt + sampled.text)
    lines = [line for sampled in samples for line in countable_lines(sampled)]
    good = sum(map(tokenises, lines))
    print()
    share = f" ({good / len(lines):.0%})" if lines else ""
    print(f"sampled lines that tokenise as Python: {good} of {len(lines)}{share}")
