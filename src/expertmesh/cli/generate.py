"""`expertmesh generate --run DIR "prompt"`: continues a text with the newest checkpoint of a run."""

import re
import sys
from typing import Any

from expertmesh.cli.flags import OptionParser
from expertmesh.config.base import FieldError
from expertmesh.errors import ConfigError

_EXAMPLES = """\
examples:
  expertmesh generate --run runs/gpt-moe-demo "def main("
  expertmesh generate --run runs/gpt-moe-demo --temperature 0.7 --top-p 0.95 --seed 3 "import os"
  expertmesh generate --run runs/gpt-moe-demo --greedy --max-tokens 50 "class Test"
"""


def run(argv: list[str]) -> int:
    """Prints the prompt and its continuation, piece by piece as it is generated, and returns 0.

    Args:
        argv: words after `generate`.

    Raises:
        ConfigError: a value breaks a rule.
        CheckpointError: the run has no usable checkpoint or tokenizer.
    """
    options = _parse(argv)
    _check(options)
    _, model, tokenizer, precision = load_decoder(options.run, options.device)
    import torch

    from expertmesh.data.tokenizer import END_OF_TEXT_ID
    from expertmesh.infer.engine import generate_text
    from expertmesh.infer.sampling import Sampling
    from expertmesh.models.decoder import EncoderDecoder

    if isinstance(model, EncoderDecoder):
        raise ConfigError(
            f"--run {options.run}: the model reads one text and writes another; use expertmesh translate"
        )

    sampling = Sampling(
        greedy=options.greedy,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )
    pieces = generate_text(
        model,
        tokenizer,
        options.prompt,
        max_new_tokens=options.max_tokens,
        sampling=sampling,
        eos_id=END_OF_TEXT_ID,
        start_id=END_OF_TEXT_ID,
    )
    with torch.no_grad(), precision.autocast():
        first = next(pieces, "")
        # Only now, so that a failure prints its line alone.
        _write(options.prompt + first)
        for piece in pieces:
            _write(piece)
    _write("\n")
    return 0


def _parse(argv: list[str]) -> Any:
    """The options; says what to do where a prompt was taken for one."""
    try:
        return _parser().parse_args(argv)
    except ConfigError as error:
        if "arguments are required: prompt" not in str(error):
            raise
        raise ConfigError(
            "no prompt; write it last, and -- before one that begins with -: generate --run DIR -- '-x'"
        ) from None


def _parser() -> OptionParser:
    from argparse import RawDescriptionHelpFormatter

    parser = OptionParser(
        prog="expertmesh generate",
        description="Continues a text with the newest checkpoint of a run.",
        epilog=_EXAMPLES,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("prompt", help="text to continue; - reads it from standard input")
    parser.add_argument("--run", required=True, metavar="DIR", help="run directory")
    parser.add_argument(
        "--max-tokens",
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="most tokens to add (as many as the model's longest sequence has room for)",
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="always the most likely token; without it, tokens are drawn",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="X",
        help="below 1: more likely tokens; 0: greedy (0.8)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="N", help="draw from the N most likely tokens (all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="X",
        help="draw from the fewest tokens with X of the probability (all)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draws (0)")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (that of the training)")
    return parser


def _check(options: Any) -> None:
    """What can be refused before anything is loaded."""
    try:
        if options.prompt == "-":
            options.prompt = sys.stdin.read()
        options.prompt.encode()
    except UnicodeError:
        raise ConfigError(
            "prompt: is not UTF-8 text; convert it, for example with iconv -t UTF-8"
        ) from None
    if not options.prompt:
        raise ConfigError("prompt='': is empty; give some text to continue")


def load_decoder(run_dir: str, device: str | None) -> tuple[Any, Any, Any, Any]:
    """What generates the text of a run: its task, the model as `Task.decoder` gives it, the tokenizer, and the precision here.

    Args:
        run_dir: of the run, with a checkpoint.
        device: that of the command line; None: that of the training.

    Raises:
        ConfigError: there is no such run or device, or models of its family generate no text.
        CheckpointError: the run has no usable checkpoint or tokenizer.
    """
    from expertmesh.training.run_dir import load_run

    found = load_run(run_dir)
    from expertmesh.data.tokenizer import load_tokenizer
    from expertmesh.training import state

    tokenizer = load_tokenizer(found.path / "tokenizer.json")
    precision = _precision(found, device)
    task = found.family.open_task(found.config)
    model = task.build(device=precision.device, dtype=precision.master_dtype)
    state.load_weights(found.checkpoint, model)
    return task, task.decoder(model.eval()), tokenizer, precision


def _precision(found: Any, device: str | None) -> Any:
    """The precision of a run, on the device that was asked for; errors speak of this verb's option."""
    from expertmesh.training.precision import resolve_precision

    try:
        config = found.config if device is None else found.config.updated({"train.device": device})
        return resolve_precision(config.train, record=found.arithmetic)
    except FieldError as error:
        raise ConfigError(f"--device {device}: {error.rule}; {error.fix}") from None
    except ConfigError as error:
        raise ConfigError(
            re.sub(r"train\.device=(\S+?):? ", r"--device \1: ", str(error), count=1)
        ) from None


def _write(text: str) -> None:
    print(text, end="", flush=True)
