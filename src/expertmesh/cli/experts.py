"""`expertmesh experts prune|join`: a trained model with fewer experts, or with the experts of two models."""

from typing import TYPE_CHECKING, Any

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.flags import OptionParser, add_data, check_least
from expertmesh.cli.terminal_progress import loading, told_of_data
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.training.regroup import Regrouped

_EXAMPLES = """\
examples:
  expertmesh experts prune runs/translate-multi30k --keep 4 --to runs/pruned
  expertmesh experts join runs/with-german runs/with-french --to runs/both
  expertmesh train translate-multi30k --train.init-from runs/pruned --train.run-dir runs/tuned
"""


def run(argv: list[str]) -> int:
    """Create the run, print a description, and return 0.

    Args:
        argv: words after `experts`.

    Raises:
        ConfigError: a value breaks a rule, or the runs do not fit.
        CheckpointError: a run has no usable checkpoint.
    """
    options = _parse(argv)
    with ended_by_exit(), told_of_data(), loading():
        from expertmesh.training.regroup import join, prune

        if options.action == "join":
            first, second = options.runs
            made = join(first, second, options.to)
        else:
            made = prune(
                options.runs[0],
                options.to,
                keep=options.keep,
                max_samples=options.samples,
                data_path=options.data_path,
            )
    print(_described(made))
    return 0


def _parse(argv: list[str]) -> Any:
    parser = OptionParser(
        prog="expertmesh experts",
        description="prune: keeps the experts of each layer that the run's validation data use most. join: unites the experts "
        "of two runs of one model; all other weights are averaged.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("action", choices=["prune", "join"], help="what to do")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="one run to prune, two to join")
    parser.add_argument(
        "--run",
        "--run-dir",
        action="append",
        default=[],
        metavar="RUN",
        help="the same, in its place",
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="the new run")
    parser.add_argument("--keep", type=int, metavar="K", help="experts of each layer (prune)")
    parser.add_argument(
        "--samples", type=int, metavar="N", help="validation samples to count (prune: all)"
    )
    add_data(parser)
    options = parser.parse_args(argv)
    options.runs = [*options.runs, *options.run]
    is_pruning = options.action == "prune"
    if len(options.runs) != (1 if is_pruning else 2):
        raise ConfigError(
            f"experts {options.action}: got {len(options.runs)} runs; name {'one' if is_pruning else 'two'}"
        )
    if is_pruning and options.keep is None:
        raise ConfigError("experts prune: needs --keep K, for example --keep 4")
    for name, flag in (("keep", "keep"), ("samples", "samples"), ("data_path", "data.path")):
        if not is_pruning and getattr(options, name) is not None:
            raise ConfigError(
                f"--{flag} {getattr(options, name)}: has no effect with join; leave it out"
            )
    check_least(options, keep=1, samples=1)
    return options


def _described(made: "Regrouped") -> str:
    sizes = set(made.num_experts)
    each = f"{sizes.pop()}" if len(sizes) == 1 else ", ".join(map(str, made.num_experts))
    text = f"{made.path}: {len(made.num_experts)} layers of {each} experts"
    if made.kept is not None:
        text += f", which had {min(made.kept):.1%} to {max(made.kept):.1%} of their layer's choices"
    return text
