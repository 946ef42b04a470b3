"""`expertmesh quantize DIR --to DIR --format int8|int4|fp8`: quantize the experts of a model to 8 or 4 bits."""

from typing import Annotated, Literal

from expertmesh.cli.decoding import say_precision
from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.parse import parsed
from expertmesh.config.fields import Folder, InputFile, ModelFolder, Operation, Spelling


class QuantizeVerb(Operation):
    """Quantizes experts to 8 or 4 bits with MSE-optimal scales, and writes a compressed-tensors folder. expertmesh
    generate and serve read it; vLLM too, if the architecture is Hugging Face's.

    examples:
      expertmesh quantize runs/gpt-moe-demo --to models/demo-int8 --format int8
      expertmesh quantize models/Qwen3-30B-A3B --to models/qwen3-int4 --format int4 --group-size 64
      expertmesh generate models/demo-int8 "def main("
    """

    run: Annotated[ModelFolder, Spelling(stands_for=("source",))]
    """run directory, or a Hugging Face model folder"""
    to: Annotated[Folder, Spelling(stands_for=("target",))]
    """folder to create"""
    format: Literal["int8", "int4", "fp8"]
    """number format; int8: a scale per row; int4: per group of a row; fp8: per block of 128 by 128"""
    group_size: Literal[32, 64, 128] | None = None
    """group size of int4: number of weights per scale (default: 64)"""
    layers: Literal["experts", "all"] = "experts"
    """layers to quantize: routed experts (experts), or attention, shared experts and dense MLPs too (all)"""
    calibration: InputFile | None = None
    """text file for calibration of int4 (GPTQ) and int8, typical of the model's input (default: no calibration)"""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """dtype of all other weights and of computation (default: as in the source)"""


def run(argv: list[str]) -> int:
    """Quantize, print a summary, and return 0."""
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
