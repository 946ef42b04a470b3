"""`expertmesh evaluate RUN --tasks FILE`: run lm-evaluation-harness on the newest checkpoint of a run."""

import json
from importlib.util import find_spec
from typing import Annotated

from expertmesh.cli.decoding import OnDevice, place_of, say_precision
from expertmesh.cli.parse import parsed
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.config.base import expanded
from expertmesh.config.fields import Count, ModelFolder, NewFile, Positive, Spelling
from expertmesh.config.output_file import write_whole
from expertmesh.errors import ConfigError

_TOKENS = 64
"""Approximate tokens of a question with its answer, for which the number of threads is chosen."""


class EvaluateVerb(OnDevice):
    """Evaluates a run with lm-evaluation-harness, with tasks and data in local files.

    examples:
      expertmesh evaluate runs/gpt-moe-demo --tasks tasks/quiz.yaml
      expertmesh evaluate runs/qwen3 --tasks quiz.yaml text.yaml --num-fewshot 5 --output results.json
    """

    run: ModelFolder
    """run directory"""
    tasks: Annotated[tuple[str, ...], Spelling("FILE", is_read=True)]
    """YAML files of tasks"""
    num_fewshot: Count | None = None
    """number of few-shot examples (default: the task's)"""
    limit: Positive | None = None
    """number of questions per task, the first ones (default: all)"""
    batch_size: Positive = 8
    """batch size in sequences"""
    output: NewFile | None = None
    """JSON file for the results"""


def run(argv: list[str]) -> int:
    """Print a line for every metric of every task, and return 0."""
    options = parsed(EvaluateVerb, argv)
    with told_of_data(), loading():
        import torch

        from expertmesh.config.evaluation_task import check_task
        from expertmesh.runs.open import open_model
        from expertmesh.runs.precision import resolve_device
        from expertmesh.runs.run_dir import find_model
        from expertmesh.text.tokenizer import end_of_text_id
        from expertmesh.training.threads import threads_of_calls

        run = find_model(options.run)
        run.check_whole()
        if options.device is not None:
            resolve_device(options.device)
        for task in options.tasks:
            check_task(expanded(task))
        if find_spec("lm_eval") is None:
            raise ConfigError("evaluate: needs lm-evaluation-harness; install it with: pip install lm_eval datasets")
        opened = open_model(run, for_autocast=True, **place_of(options))
        model, tokenizer, precision = opened.decoder, opened.text.tokenizer, opened.precision
        say_precision(precision)

        from expertmesh.integrations.evaluation import evaluate

    num_rows = _TOKENS * options.batch_size
    with (
        threads_of_calls(model, precision, num_rows=num_rows),
        torch.no_grad(),
        precision.autocast(),
    ):
        found = evaluate(
            model,
            tokenizer,
            options.tasks,
            end_id=end_of_text_id(tokenizer),
            batch_size=options.batch_size,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
        )
    if options.output is not None:
        text = json.dumps({"run": options.run, "results": found["results"]}, indent=2, default=str)
        write_whole(expanded(options.output), text + "\n")
    for task, values in found["results"].items():
        for name, value in values.items():
            metric, _, kind = name.partition(",")
            if isinstance(value, float) and not metric.endswith("_stderr"):
                print(f"{task}  {metric}{'' if kind == 'none' else f' ({kind})'}  {value:.4f}")
    return 0
