"""`expertmesh plan`: predict cost, memory and time of a model on a cluster. Never imports torch."""

from typing import Any

from expertmesh.cli.flags import OptionParser
from expertmesh.cli.help_wrapping import fitted
from expertmesh.config.output_file import output_file
from expertmesh.errors import ConfigError, command

_EXAMPLES = """\
examples:
  expertmesh plan gpt-1.3b-moe128 --cluster a100-80x128
  expertmesh plan models/Qwen3-30B-A3B --cluster h100x64 --tokens-per-batch 4194304 --tokens 1e12
  expertmesh plan deepseek-v3 --cluster mine.toml --goal memory
  expertmesh plan qwen3-30b --cluster h100x8 --serve --batch 64 --context 4096
"""
_OF_TRAINING = (
    "goal",
    "tokens_per_batch",
    "max_context",
    "tokens",
    "imbalance",
    "states",
    "pp",
    "vpp",
    "measured",
)
"""Options of `plan` that a plan of generation does not read."""
_MOVED = {
    "--validate": "python -m benchmarks.planner",
    "--claims": "python -m benchmarks.planner --claims",
}
"""Former options, and the programs that took their place."""


def run(argv: list[str]) -> int:
    """Run the verb; returns 0.

    Args:
        argv: words after `plan`.

    Raises:
        ConfigError: a word breaks a rule, or the model does not fit the cluster.
    """
    for word, program in _MOVED.items():
        if word in argv:
            raise ConfigError(f"{word}: is no option of this verb; run {program} in a clone")
    options = _parser().parse_args(argv)
    if options.model is None:
        example = command("plan gpt-1.3b-moe128 --cluster a100-80x128")
        raise ConfigError(f"no model given; write one: {example} (see {command('plan --help')})")
    if options.cluster is None:
        raise ConfigError("--cluster: must be given; for example h100x64, or a TOML file")
    if options.serve:
        return _serve(options)
    for name in ("batch", "context"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: is of generation; give --serve, too, or leave it out")
    return _plan(options)


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh plan",
        description="Says what a model costs on a cluster: memory, time, days and price, with error bars.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a recipe, a run, a config.json of the hub or its folder, or a published model",
    )
    parser.add_argument("--cluster", metavar="NAME", help="DEVICExNUMBER (h100x64), or a TOML file")
    parser.add_argument(
        "--goal",
        choices=["throughput", "memory", "latency"],
        help="of the search (throughput)",
    )
    parser.add_argument(
        "--tokens-per-batch", type=int, metavar="N", help="of an optimizer step (the recipe's)"
    )
    parser.add_argument(
        "--max-context", type=int, metavar="N", help="tokens of a sequence (the recipe's)"
    )
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="of the whole training (the recipe's)"
    )
    parser.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="rows of the fullest rank over the mean (1.15); 1: forced balance",
    )
    parser.add_argument(
        "--states",
        metavar="KIND",
        help="optimizer states: ours, bf16_moments, int8_moments, fairseq, ... (the recipe's, ours)",
    )
    parser.add_argument(
        "--pp", type=int, help="pipeline stages of a published run; there are none here"
    )
    parser.add_argument("--vpp", type=int, help="virtual stages of each")
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="write an HTML page: the front, bars by part, scaling",
    )
    parser.add_argument(
        "--serve", action="store_true", help="plan generation: time per token, price, memory"
    )
    parser.add_argument("--batch", type=int, metavar="B", help="sequences at once on all devices")
    parser.add_argument("--context", type=int, metavar="N", help="tokens of each of them")
    parser.add_argument(
        "--measured",
        metavar="FILE",
        help="your own measurements (TOML), on which it is fitted, too",
    )
    return parser


def _plan(options: Any) -> int:
    from expertmesh.planner.plan import plan

    if options.page is not None:
        output_file("page", options.page)  # checked before the computation
    given = {name: getattr(options, name) for name in _OF_TRAINING}
    given = {name: value for name, value in given.items() if value is not None}
    found = plan(options.model, cluster=options.cluster, **given)
    page = None
    if options.page is not None:
        from expertmesh.planner.plan_page import write_page

        page = write_page(found, options.page)
    for line in found.text().split("\n"):
        print(fitted(line) if line.lstrip().startswith("torchrun ") else line)
    if page is not None:
        print(f"\npage: {page}")
    return 0


def _serve(options: Any) -> int:
    from expertmesh.planner.serve import serve_plan
    from expertmesh.planner.table import serve_text

    for name in ("batch", "context"):
        if getattr(options, name) is None:
            raise ConfigError(f"--{name}: must be given with --serve; for example --{name} 64")
    for name in (*_OF_TRAINING, "page"):
        if getattr(options, name) is not None:
            word = name.replace("_", "-")
            raise ConfigError(f"--{word}: is of training; leave it out, or --serve")
    found = serve_plan(
        options.model, cluster=options.cluster, batch=options.batch, context=options.context
    )
    print(serve_text(found))
    return 0
