"""`expertmesh export RUN --output FILE.safetensors`: write a model's weights to one file."""

from typing import Annotated

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.parse import parsed
from expertmesh.config.base import expanded
from expertmesh.config.fields import ModelFolder, Operation, Spelling


class ExportVerb(Operation):
    """Exports a checkpoint, saved by any number of ranks, as one safetensors file with ExpertMesh's tensor names.

    examples:
      expertmesh export runs/gpt-moe-demo --output demo.safetensors
      expertmesh export runs/gpt-moe-demo/checkpoints/step_00000200 --output demo.safetensors --overwrite

    for transformers, vLLM and SGLang: expertmesh convert
    """

    run: ModelFolder
    """run directory (its newest checkpoint), or checkpoint folder"""
    output: Annotated[str, Spelling("FILE")]
    """file to write"""
    overwrite: bool = False
    """overwrite an existing file"""


def run(argv: list[str]) -> int:
    """Write the file, print a summary, and return 0."""
    options = parsed(ExportVerb, argv)
    from expertmesh.training.export import export

    output = expanded(options.output)
    with ended_by_exit():
        found = export(expanded(options.run), output, overwrite=options.overwrite)
    print(
        f"{output}: {found.num_tensors} tensors, {found.num_bytes:,} bytes, of step {found.step} ({found.checkpoint})"
    )
    return 0
