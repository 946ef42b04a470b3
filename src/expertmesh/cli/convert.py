"""`expertmesh convert --from DIR --to DIR`: convert a hub folder to a run, or a run to a hub folder."""

from expertmesh.cli.exit_signals import ended_by_exit
from expertmesh.cli.flags import OptionParser, either
from expertmesh.errors import ConfigError, command

_EXAMPLES = """\
examples:
  hf download Qwen/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B
  expertmesh convert --from models/Qwen3-30B-A3B --to runs/qwen3
  expertmesh generate runs/qwen3 "Once upon a time"
  expertmesh convert --from runs/gpt-moe-demo --to models/demo   # for transformers and vLLM

for one file under expertmesh's own names: expertmesh export
"""
_DTYPES = ("float32", "bfloat16", "float16")


def run(argv: list[str]) -> int:
    """Convert, print a summary, and return 0.

    Args:
        argv: words after `convert`.

    Raises:
        ConfigError: a path or an option of the model breaks a rule.
        CheckpointError: the source is damaged, or a tensor does not fit.
    """
    options = _parser().parse_args(argv)
    source = either(options.folder, options.source)
    if source is None:
        example = command("convert runs/demo --to models/demo")
        raise ConfigError(
            f"no folder given; write one: {example} (see {command('convert --help')})"
        )
    import torch

    from expertmesh.integrations.hub import convert

    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    with ended_by_exit():
        made = convert(source, options.target, dtype=dtype)
    print(f"{made.path}: {made.what}")
    return 0


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh convert",
        description="Turns a Mixtral, Qwen3-MoE, Qwen2-MoE, OLMoE, GLM-4-MoE, Dots1, gpt-oss or DeepSeek-V2 / V3 in the hub's format into a run, "
        "or a run into one of these that transformers, vLLM and SGLang read. The direction follows from the source.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "folder", nargs="?", metavar="DIR", help="hub folder, run or checkpoint to convert"
    )
    parser.add_argument("--from", dest="source", metavar="DIR", help="the same, in its place")
    parser.add_argument("--to", dest="target", required=True, metavar="DIR", help="new folder")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the weights; as they are if not given")
    return parser
