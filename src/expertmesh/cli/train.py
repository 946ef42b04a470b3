"""`expertmesh train RECIPE`: train a model and print the result."""

import json
import shlex
from typing import TYPE_CHECKING

from expertmesh.cli.flags import TrainVerb
from expertmesh.cli.prog_name import prog_name
from expertmesh.cli.start_training import parse_and_begin, ready_to_train
from expertmesh.cli.terminal_progress import silence_output, tell
from expertmesh.config.launched import launched_rank
from expertmesh.config.run import ParallelConfig, RunConfig
from expertmesh.models.family import Family

if TYPE_CHECKING:
    from expertmesh.training.loop import TrainResult


def run(argv: list[str]) -> int:
    """Run the verb.

    Returns:
        0, or 128 + N when signal N stopped the run after a clean save: 129 a closed terminal, 130 Ctrl-C, 141 a dead
        pipe, 143 SIGTERM.
    """
    parsed = parse_and_begin(argv, TrainVerb)
    if parsed.dry_run:
        rank, num_ranks = launched_rank()
        num_ranks = max(num_ranks, fewest_ranks(parsed.config.parallel) if num_ranks == 1 else 1)
        if rank == 0:
            family = parsed.family
            print(describe(parsed.config, family, recipe=parsed.recipe, num_ranks=num_ranks))
        return 0
    with ready_to_train(parsed.config, verbose=parsed.options.verbose):
        from expertmesh.reporting.training_samples import training_samples
        from expertmesh.training.loop import train
        from expertmesh.training.stop import NOBODY_READS

        result = train(parsed.config, recipe=parsed.recipe, family=parsed.family, sampler=training_samples)
    if result.stopped_by in NOBODY_READS:
        silence_output()
    elif result.is_leader:
        _say(summary(result, parsed.family))
    return 0 if result.stopped_by is None else 128 + int(result.stopped_by)


def _say(text: str) -> None:
    """Print the summary of a finished run, on standard error if standard output fails; the run's files have the
    numbers."""
    try:
        print(text, flush=True)
    except OSError as error:
        silence_output()
        said = "; ".join(text.splitlines())
        tell(f"standard output cannot be written ({error.strerror}): {said}")


def fewest_ranks(parallel: ParallelConfig) -> int:
    """Smallest number of ranks for the degrees."""
    holding = (parallel.dp_shard_degree or 1) * parallel.tp_degree
    wanted = max(parallel.ep_degree, default=1) * (parallel.es_degree or 1)
    return parallel.dp_replicate_degree * max(holding, wanted, parallel.route_degree or 1)


def describe(config: RunConfig, family: Family, *, recipe: str, num_ranks: int = 1) -> str:
    """Description of a run: resolved configuration, and parameters, FLOPs and memory of each rank if known."""
    from expertmesh.costs.memory_text import bytes_text, memory_text
    from expertmesh.runs.precision import resolve_precision
    from expertmesh.runs.run_dir import RunDir
    from expertmesh.training.teacher import teacher_bytes

    family.open_task(config).builder.check(num_ranks)
    precision = resolve_precision(
        config.train,
        products=family.products_of(config),
        record=RunDir(config.train.run_dir).arithmetic,
    )
    dtype = str(precision.compute_dtype).removeprefix("torch.")
    lines = [f"recipe      {recipe}", f"device      {precision.device}, computing in {dtype}"]
    on_gpu = precision.device.type != "cpu"
    costs = family.costs_of(config, num_ranks=num_ranks, dtype=dtype, on_gpu=on_gpu)
    if costs is not None:
        item = family.items.removesuffix("s")
        lines += [
            f"parameters  {costs.parameters:,} in all, {costs.active:,} active per {item}",
            (
                f"training    {_length(config, costs.num_items, family)}, {costs.flops_per_item / 1e9:,.3f} GFLOP per "
                f"{item}"
            ),
            f"memory      {memory_text(costs.memory, num_ranks, on_gpu=on_gpu)}",
        ]
    if costs is not None and costs.adapters:
        lines.append(f"adapters    {costs.adapters}")
    taught = teacher_bytes(config, family, num_ranks=num_ranks, compute_dtype=precision.compute_dtype)
    if taught:
        lines.append(f"teacher     {bytes_text(taught)} of weights on each rank, beside these")
    return "\n".join([*lines, "configuration", json.dumps(config.model_dump(mode="json"), indent=2)])


def _length(config: RunConfig, num_items: int, family: Family) -> str:
    """Length of a run: its items, or epochs of data that are not read yet."""
    epochs = config.train.epochs
    if epochs is None:
        return f"{num_items:,} {family.items}"
    return f"{epochs:g} epoch{'' if epochs == 1 else 's'} of the data"


def summary(result: "TrainResult", family: Family) -> str:
    """Summary of a finished run, in a few lines."""
    rate = result.items / result.seconds if result.seconds else 0.0
    done = (
        f"{result.step:,} steps, {result.items:,} {family.items} in {result.seconds:,.1f} s of training"
        f" ({rate:,.0f} {family.items}/s)"
    )
    lines = [done + ("; nothing was left to do" if result.resumed_from == result.step else "")]
    metric = result.metric or family.metric
    if result.evaluation is not None:
        before, at = result.initial_evaluation, result.evaluated_at
        when = "" if at is None or at == result.step else f" after step {at:,}"
        lines.append(
            f"validation{when}: {result.evaluation[metric.key]:.4f} {metric.text}"
            + ("" if before is None else f", {before[metric.key]:.4f} before training")
        )
    if result.skipped_steps:
        lines.append(f"{result.skipped_steps} steps were skipped (not finite)")
    if result.checkpoint is not None:
        lines.append(f"checkpoint: {result.checkpoint}")
        lines.append(f"try: {prog_name()} report {shlex.quote(str(result.run_dir))}")
    return "\n".join(lines)
