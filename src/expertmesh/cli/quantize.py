"""`expertmesh quantize DIR --to DIR --format int8|int4|fp8`: quantize the experts of a model to 8 or 4 bits."""

from typing import Annotated, Literal

from expertmesh.cli.decoding import say_precision
from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.parse import parsed
from expertmesh.config.fields import Folder, InputFile, ModelFolder, Operation, Spelling


class QuantizeVerb(Operation):
    """Rounds the experts' matrices to 8 or 4 bits, with the scales that leave the least squared error, and writes a compressed-tensors folder: for expertmesh generate and em.Engine, and under the hub's names for vLLM, where the hub has such a model.

    examples:
      expertmesh quantize runs/gpt-moe-demo --to models/demo-int8 --format int8
      expertmesh quantize models/Qwen3-30B-A3B --to models/qwen3-int4 --format int4 --group-size 64
      expertmesh generate models/demo-int8 "def main("
    """

    run: Annotated[ModelFolder, Spelling(stands_for=("source",))]
    """run directory, or a model in the hub's format"""
    to: Annotated[Folder, Spelling(stands_for=("target",))]
    """new folder"""
    format: Literal["int8", "int4", "fp8"]
    """int8: a scale per row; int4: one per group of a row; fp8: one per block of 128 by 128"""
    group_size: Literal[32, 64, 128] | None = None
    """numbers that share a scale in int4 (default: 64)"""
    layers: Literal["experts", "all"] = "experts"
    """layers to round: the experts, or the matrices of attention and dense MLPs, too"""
    calibration: InputFile | None = None
    """text such as the model will read, which weighs the rounding errors (default: all weigh the same)"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """type of all other weights, and of products (default: as in the source)"""


def run(argv: list[str]) -> int:
    """Quantize, print a summary, and return 0.

    Args:
        argv: words after `quantize`.

    Raises:
        ConfigError: a path breaks a rule, an option has no effect, or a size of the model does not fit the format.
        CheckpointError: the source is damaged.
    """
    options = parsed(QuantizeVerb, argv)
    import torch

    from expertmesh.integrations.hub import quantize

    with ended_by_exit():
        made = quantize(
            options.run,
            options.to,
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
