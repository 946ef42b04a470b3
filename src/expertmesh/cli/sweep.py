"""`expertmesh sweep RECIPE --rates 1e-3,2e-3`: train at several learning rates, and compare the results in a table."""

import signal
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar

from expertmesh.cli.flags import TrainVerb
from expertmesh.cli.options import flag_name
from expertmesh.cli.start_training import parse_and_begin, ready_to_train
from expertmesh.cli.terminal_progress import silence_output, tell
from expertmesh.config.fields import Spelling
from expertmesh.config.launched import launched_rank
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family

if TYPE_CHECKING:
    from expertmesh.training.sweep import SweptRate


class SweepVerb(TrainVerb):
    """Trains the recipe once for each learning rate, in --train.run-dir/lr-RATE, and prints the rate of the best
    validation metric; a rerun resumes. All options of train but --optim.lr, --train.resume and --dry-run.

    examples:
      expertmesh sweep gpt-moe-demo --rates 6e-3,12e-3,24e-3
      expertmesh sweep gpt-moe-demo --rates 1e-3 2e-3 --train.run-dir runs/rates --train.steps 200
    """

    refused: ClassVar[Mapping[str, str]] = {
        "optim.lr": "has no effect in a sweep, whose rates --rates gives; leave it out",
        "train.resume": "a sweep always goes on where it stopped; leave it out",
        "dry_run": "is for one run; use expertmesh train with it",
    }
    rates: Annotated[tuple[float, ...], Spelling("RATE")]
    """learning rates"""


def run(argv: list[str]) -> int:
    """Run the verb.

    Returns:
        0; 1: no run is finished with a finite loss; 128 + N when signal N stopped it after a clean save.
    """
    parsed = parse_and_begin(argv, SweepVerb)
    assert isinstance(parsed.options, SweepVerb)
    for name, fix in SweepVerb.refused.items():
        if name in parsed.from_words or (name == "dry_run" and parsed.dry_run):
            raise ConfigError(f"{flag_name(name)}: {fix}")
    if launched_rank()[1] > 1:
        raise ConfigError("sweep under torchrun: it starts one run after the other; use one process")
    if "optim.lr" in parsed.from_file:  # a run's config.json has all options, so this is not an error
        tell(f"note: --optim.lr {parsed.config.optim.lr!r} of --config is ignored: --rates sets the learning rates")
    with ready_to_train(parsed.config, verbose=parsed.options.verbose):
        from expertmesh.training.stop import NOBODY_READS
        from expertmesh.training.sweep import best_rate, sweep

        found = sweep(parsed.config, parsed.options.rates, recipe=parsed.recipe, family=parsed.family)
    stopped = None if found[-1].stopped_by is None else signal.Signals[found[-1].stopped_by]
    if stopped in NOBODY_READS:
        silence_output()
    else:
        print(table(found, parsed.family))
    if stopped is not None:
        return 128 + stopped
    best = best_rate(found, parsed.family.metric)
    if best is None:
        print("no rate ended with a finite loss; try lower ones")
        return 1
    print(f"best: --optim.lr {best.lr!r}")
    return 0


def table(runs: Sequence["SweptRate"], family: Family) -> str:
    """Table of the runs, one per line."""
    lines = [f"{'rate':>10} {'loss':>10} {family.metric.short:>12} {'steps':>8} {'seconds':>9}"]
    for one in runs:
        missing = "diverged" if one.stopped_by is None else "-"
        loss, metric = (missing if value is None else f"{value:.4f}" for value in (one.loss, one.metric))
        ended = "" if one.stopped_by is None else f"  stopped by {one.stopped_by}"
        lines.append(f"{one.lr!r:>10} {loss:>10} {metric:>12} {one.steps:>8,} {one.seconds:>9,.1f}{ended}")
    return "\n".join(lines)
