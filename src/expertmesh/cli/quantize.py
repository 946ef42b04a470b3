"""`expertmesh quantize DIR --to DIR --format int8|int4|fp8`: quantize the experts of a model to 8 or 4 bits."""

from expertmesh.cli.decoding import say_precision
from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.flags import OptionParser

_EXAMPLES = """\
examples:
  expertmesh quantize runs/gpt-moe-demo --to models/demo-int8 --format int8
  expertmesh quantize models/Qwen3-30B-A3B --to models/qwen3-int4 --format int4 --group-size 64
  expertmesh generate models/demo-int8 "def main("
"""


def run(argv: list[str]) -> int:
    """Quantize, print a summary, and return 0.

    Args:
        argv: words after `quantize`.

    Raises:
        ConfigError: a path breaks a rule, an option has no effect, or a size of the model does not fit the format.
        CheckpointError: the source is damaged.
    """
    options = _parser().parse_args(argv)
    import torch

    from expertmesh.integrations.hub import quantize

    with ended_by_exit():
        made = quantize(
            options.run,
            options.target,
            format=options.format,
            group_size=options.group_size,
            layers=options.layers,
            calibration=options.calibration,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            on_opened=say_precision,
        )
    share = made.report["bytes"] / made.report["bytes_before"]
    print(f"{made.path}: a {made.what}, {made.report['bytes']:,} bytes ({share:.0%} of before)")
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh quantize",
        description="Rounds the experts' matrices to 8 or 4 bits, with the scales that leave the least squared error, and writes a "
        "compressed-tensors folder: for expertmesh generate and em.Engine, and under the hub's names for vLLM, where the hub has such a model.",
        epilog=_EXAMPLES,
    )
    parser.add_run(what="run directory, or a model in the hub's format")
    parser.add_argument("--to", dest="target", required=True, metavar="DIR", help="new folder")
    parser.add_argument(
        "--format",
        required=True,
        choices=("int8", "int4", "fp8"),
        help="int8: a scale per row; int4: one per group of a row; fp8: one per block of 128 by 128",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=(32, 64, 128),
        help="numbers that share a scale in int4 (64)",
    )
    parser.add_argument(
        "--layers",
        choices=("experts", "all"),
        default="experts",
        help="what is rounded: the experts, or the matrices of attention and dense MLPs, too (experts)",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text such as the model will read: numbers are rounded for what its tokens multiply (for the numbers alone)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="of all else, and of products (that of the source)",
    )
    return parser
