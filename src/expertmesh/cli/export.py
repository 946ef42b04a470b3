"""`expertmesh export RUN --output FILE.safetensors`: write a model's weights to one file."""

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.flags import OptionParser
from expertmesh.config.base import expanded

_EXAMPLES = """\
examples:
  expertmesh export runs/gpt-moe-demo --output demo.safetensors
  expertmesh export runs/gpt-moe-demo/checkpoints/step_00000200 --output demo.safetensors --overwrite

for transformers, vLLM and SGLang: expertmesh convert
"""


def run(argv: list[str]) -> int:
    """Write the file, print a summary, and return 0.

    Args:
        argv: words after `export`.

    Raises:
        ConfigError: a path breaks a rule.
        CheckpointError: there is no usable checkpoint.
    """
    from expertmesh.training.export import export

    options = _parser().parse_args(argv)
    source = expanded(options.run)
    output = expanded(options.output)
    with ended_by_exit():
        found = export(source, output, overwrite=options.overwrite)
    print(
        f"{output}: {found.num_tensors} tensors, {found.num_bytes:,} bytes, of step {found.step} ({found.checkpoint})"
    )
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh export",
        description="Writes the weights of a checkpoint, of however many ranks, as one safetensors file under expertmesh's own names.",
        epilog=_EXAMPLES,
    )
    parser.add_run(what="run directory (its newest good checkpoint), or a checkpoint's folder")
    parser.add_argument("--output", required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--overwrite", action="store_true", help="the file may exist already")
    return parser
