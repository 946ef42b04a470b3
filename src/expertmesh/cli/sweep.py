"""`expertmesh sweep RECIPE --rates 1e-3,2e-3`: train at several learning rates, and compare the results in a table."""

import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expertmesh.cli.flags import listed
from expertmesh.cli.help_wrapping import fitted
from expertmesh.cli.options import flag_name
from expertmesh.cli.start_training import parse_and_begin, ready_to_train
from expertmesh.cli.terminal_progress import silence_output, tell
from expertmesh.config.base import launched_rank
from expertmesh.errors import ConfigError
from expertmesh.models.family import Family

if TYPE_CHECKING:
    from expertmesh.training.sweep import SweptRate

_HELP = """\
usage: expertmesh sweep RECIPE --rates RATE RATE ... [options of train]

Trains the recipe once for each learning rate (with blanks or commas between, or --rates before each), in folders lr-RATE of --train.run-dir, and says which ends best. Started again it
goes on where it stopped. All other options are those of `expertmesh train RECIPE --help`, but for --optim.lr and --train.resume.
"""


def run(argv: list[str]) -> int:
    """Run the verb.

    Args:
        argv: words after `sweep`.

    Returns:
        0; 1: no run is finished with a finite loss; 128 + N when signal N stopped it after a clean save.

    Raises:
        ConfigError: a word or an option breaks a rule.
    """
    if "--help" in argv or "-h" in argv:
        print(fitted(_HELP), end="")
        return 0
    rates, words = _rates(argv)
    _check_its_own(words)
    parsed = parse_and_begin(words)
    if launched_rank()[1] > 1:
        raise ConfigError(
            "sweep under torchrun: it starts one run after the other; use one process"
        )
    if parsed.dry_run:
        raise ConfigError("--dry-run: is for one run; use expertmesh train with it")
    if (
        "optim.lr" in parsed.from_file
    ):  # a run's config.json has all options, so this is not an error
        tell(
            f"note: --optim.lr {parsed.config.optim.lr!r} of --config is left aside: --rates gives the rates"
        )
    with ready_to_train(parsed.config, verbose=parsed.verbose):
        from expertmesh.training.stop import NOBODY_READS
        from expertmesh.training.sweep import best_rate, sweep

        found = sweep(parsed.config, rates, recipe=parsed.recipe, family=parsed.family)
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


def _check_its_own(words: Sequence[str]) -> None:
    """Raise ConfigError for options that a sweep sets itself."""
    for word in words:
        option = word.partition("=")[0].replace("_", "-")
        for name, fix in (
            ("optim.lr", "has no effect in a sweep, whose rates --rates gives; leave it out"),
            ("train.resume", "a sweep always goes on where it stopped; leave it out"),
        ):
            if option == flag_name(name):
                raise ConfigError(f"{option}: {fix}")


def _rates(argv: Sequence[str]) -> tuple[list[float], list[str]]:
    """Learning rates, and the other words."""
    texts: list[str] = []
    others: list[str] = []
    place = 0
    while place < len(argv):
        name, equals, text = argv[place].partition("=")
        place += 1
        if name != "--rates":
            others.append(argv[place - 1])
            continue
        mine = [text] if equals else []
        while not equals and place < len(argv) and (not mine or _is_rates(argv[place])):
            mine.append(argv[place])
            place += 1
        texts += mine or [""]
    if not texts:
        raise ConfigError("no rates given; write for example --rates 1e-3,2e-3,4e-3")
    if not all(map(_is_rates, texts)):
        raise ConfigError(
            f"--rates {' '.join(texts)}: must be numbers with blanks or commas between; write for example 1e-3,2e-3"
        )
    return [float(rate) for rate in listed(texts)], others


def _is_rates(text: str) -> bool:
    try:
        return bool([float(rate) for rate in text.split(",") if rate])
    except ValueError:
        return False


def table(runs: Sequence["SweptRate"], family: Family) -> str:
    """Table of the runs, one per line."""
    lines = [f"{'rate':>10} {'loss':>10} {family.metric.short:>12} {'steps':>8} {'seconds':>9}"]
    for one in runs:
        missing = "diverged" if one.stopped_by is None else "-"
        loss, metric = (
            missing if value is None else f"{value:.4f}" for value in (one.loss, one.metric)
        )
        ended = "" if one.stopped_by is None else f"  stopped by {one.stopped_by}"
        lines.append(
            f"{one.lr!r:>10} {loss:>10} {metric:>12} {one.steps:>8,} {one.seconds:>9,.1f}{ended}"
        )
    return "\n".join(lines)
