"""`expertmesh generate RUN "prompt"`: continue a text with the newest checkpoint of a run, or with a hub model."""

import json
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expertmesh.cli.decoding import (
    add_place,
    add_ranks,
    eplb_of,
    kept,
    load_adapter,
    open_decoder,
    say_precision,
    shared_by,
)
from expertmesh.cli.flags import OptionParser, add_fields, check_least, fields_of
from expertmesh.cli.prog_name import Flags
from expertmesh.cli.prompts import (
    Asked,
    Prompt,
    asked_by_hand,
    check_variables_read,
    prompts_of,
    variables_of,
)
from expertmesh.cli.terminal_progress import tell, told_of_data
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.base import launched_rank
from expertmesh.config.engine import EPLB, EngineConfig
from expertmesh.config.output_file import output_file
from expertmesh.config.sampling import OF_OUTPUTS, TEXT_DEFAULTS, SamplingParams
from expertmesh.errors import ConfigError, command, text_of

if TYPE_CHECKING:
    from expertmesh.engine.engine import Engine
    from expertmesh.runs.open import LoadedModel

_EXAMPLES = """\
examples:
  expertmesh generate runs/gpt-moe-demo "def main("
  expertmesh generate runs/gpt-moe-demo --temperature 0.7 --top-p 0.95 --seed 3 "import os"
  expertmesh generate runs/gpt-moe-demo --greedy --max-tokens 50 "class Test" "def main("
  expertmesh generate runs/gpt-moe-demo --input prompts.txt   # a prompt on each line
  expertmesh generate runs/chat --chat --input asked.jsonl --output answered.jsonl
  expertmesh generate runs/gpt-moe-demo --interactive
  expertmesh generate models/Qwen3-30B-A3B "import os"   # a folder as the hub has it
  expertmesh generate runs/chat --chat "What is 2 + 2?"   # a run that learned conversations
  torchrun --nproc-per-node 8 -m expertmesh generate runs/qwen3 "def main("   # experts cut over 8 GPUs
  torchrun --nproc-per-node 4 -m expertmesh generate runs/qwen3 --parallel.tp-degree 2 --input prompts.txt   # attention, too
"""

_NO_TALK = (
    "has no chat template and no tokens for roles; unless it learned conversations with a tokenizer of its own choice, it does "
    "not know how to answer"
)
_ROOM = 4
"""Inverse share of the model's maximum length that a conversation leaves for the answer: 1 / 4."""
_FORGETS = "the oldest turns are forgotten: the model has room for {} tokens, the answer among them"
_NO_PROMPT = "no prompt; write it last, and -- before one that begins with -: generate RUN -- '-x'"


def run(argv: list[str]) -> int:
    """Print, or write with --output, each prompt and its continuation; a single one is printed as a stream. Returns 0.

    Args:
        argv: words after `generate`.

    Raises:
        ConfigError: a value breaks a rule.
        CheckpointError: the run has no usable checkpoint or tokenizer.
    """
    with once_per_host():
        options = _parse(argv)
    prompts = prompts_of(options) if launched_rank()[0] == 0 else []
    if options.output is not None:
        with once_per_host():
            options.output = output_file("output", options.output, read=[options.input])
    num_rows = min(len(prompts) or 1, options.batch_size)
    with ExitStack() as stack:
        with told_of_data():
            opened = stack.enter_context(
                open_decoder(options, num_rows=num_rows, is_asked=options.interactive)
            )
        if opened.shared is None:
            _generate(options, opened.ranks.on_rank0(lambda: prompts), opened)
        else:
            _generate_together(options, prompts, opened)
    return 0


def _generate_together(options: Any, prompts: list[Prompt], opened: "LoadedModel") -> None:
    """Continue texts on ranks that share the model: rank 0 has the texts, the others follow it."""
    from expertmesh.engine.engine import Engine

    text = opened.text
    with opened.precision.autocast():
        engine = Engine(
            opened.decoder,
            text.tokenizer,
            end_ids=text.end_ids,
            max_sequences=options.batch_size,
            num_draft_tokens=options.num_draft_tokens or 0,
            parallel=opened.shared,
            **eplb_of(options),
        )
        if not engine.leads:
            engine.follow()
            return
        with closing(engine):
            if options.adapter is not None:
                load_adapter(engine, options.adapter, options.adapter)
            _generate(options, prompts, opened, engine)


def _engine(options: Any, opened: "LoadedModel") -> "Engine | None":
    """Engine for options that need one (draft tokens, adapters); None: not needed."""
    from expertmesh.engine.checks import why_not
    from expertmesh.engine.engine import Engine
    from expertmesh.engine.texts import writer

    if not options.num_draft_tokens and options.adapter is None:
        return None
    size, guesses = options.batch_size, options.num_draft_tokens or 0
    made = writer(opened.decoder, opened.text, batch_size=size, num_draft_tokens=guesses)
    if not isinstance(made, Engine):
        raise ConfigError(f"--adapter {options.adapter}: {why_not(opened.decoder)}; leave it out")
    if options.adapter is not None:
        load_adapter(made, options.adapter, options.adapter)
    return made


def _generate(
    options: Any, prompts: list[Prompt], opened: "LoadedModel", engine: "Engine | None" = None
) -> None:
    """Continue texts; either all ranks have the same texts, or rank 0 has an engine that the others follow."""
    model, ranks = opened.decoder, opened.ranks
    import torch

    from expertmesh.engine.texts import continued, stream_text
    from expertmesh.models.decoder import EncoderDecoder
    from expertmesh.text.chat import latest_turns

    if isinstance(model, EncoderDecoder):
        raise ConfigError(
            f"run {options.run}: the model reads one text and writes another; use {command('translate')}"
        )

    text = opened.text
    if options.chat and not text.can_chat:
        tell(f"note: run {options.run}: {_NO_TALK}")
    params = options.params
    ids_of = _encoder(options, opened, params)
    engine, adapter = engine or _engine(options, opened), options.adapter

    def answer(prompt: list[int], shown: str = "") -> str:
        pieces = stream_text(model, prompt, params, text=text, by=engine, adapter=adapter)
        said = [next(pieces, "")]
        # After the first piece, so that an error prints only its line.
        if not options.interactive:
            say_precision(opened.precision)
        _write(shown + said[0])
        for piece in pieces:
            _write(piece)
            said.append(piece)
        _write("\n")
        return "".join(said)

    def converse(turns: list[dict[str, str]], prompt: str) -> list[dict[str, str]]:
        limit = model.max_seq_len
        turns = [*turns, {"role": "user", "content": prompt}]
        most = limit - (params.max_tokens or limit // _ROOM)
        variables = options.chat_template_kwargs
        kept, ids = latest_turns(text.chat, turns, most=most, window=limit, variables=variables)
        if len(kept) < len(turns):
            tell(f"note: {_FORGETS.format(limit)}")
        return [*kept, {"role": "assistant", "content": answer(ids)}]

    is_alone = opened.shared is not None
    ask: Callable[..., Any] = (lambda function: function()) if is_alone else ranks.on_rank0
    with torch.no_grad(), opened.precision.autocast():
        if options.interactive:
            say_precision(opened.precision)
            turns: list[dict[str, str]] = []
            asking = asked_by_hand()
            while prompt := ask(lambda: next(asking, None)):
                try:
                    if options.chat:
                        turns = converse(turns, prompt)
                    else:
                        answer(ids_of(Prompt(prompt)))
                except ConfigError as error:
                    tell(f"error: {Flags('generate').spell(error)}")
        elif len(prompts) == 1 and options.output is None and isinstance(prompts[0].asked, str):
            answer(ids_of(prompts[0]), "" if options.chat else prompts[0].asked)
        else:
            with told_of_data():
                answers = continued(
                    model,
                    list(map(ids_of, prompts)),
                    params,
                    text=text,
                    batch_size=options.batch_size,
                    by=engine,
                    adapter=adapter,
                )
            say_precision(opened.precision)
            if options.output is None:
                _print_all([one.asked for one in prompts], answers, is_chat=options.chat)
            elif ranks.is_leader:
                _write_all(options.output, [one.asked for one in prompts], answers)
            else:
                for _ in answers:
                    pass


def _encoder(
    options: Any, opened: "LoadedModel", params: SamplingParams
) -> Callable[[Prompt], list[int]]:
    """Function that encodes a prompt and checks its length; its errors name the prompt's place."""
    from expertmesh.engine.checks import check_prompts
    from expertmesh.engine.lockstep import check_context_room
    from expertmesh.engine.texts import prompt_ids
    from expertmesh.text.chat import read_messages

    model, text, variables = opened.decoder, opened.text, options.chat_template_kwargs
    check_variables_read(variables, text.chat)

    def encoded(asked: Asked) -> list[int]:
        if isinstance(asked, str) and not options.chat:
            return prompt_ids(text, asked, start=not options.no_start)
        turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        return text.chat_ids(read_messages(turns), variables=variables)

    def ids_of(prompt: Prompt) -> list[int]:
        try:
            ids = encoded(prompt.asked)
            check_prompts([ids], model.vocab_size, what="prompt")
            check_context_room(model, [ids], max_tokens=params.max_tokens)
        except ConfigError as error:
            if not prompt.where:
                raise
            raise ConfigError(f"{prompt.where}: {text_of(error)}") from None
        return ids

    return ids_of


def _print_all(prompts: list[Asked], answers: Iterator[Any], *, is_chat: bool) -> None:
    """Print each answer as soon as it and those before it have ended."""
    between = "\n" if is_chat else ""
    for number, (prompt, one) in enumerate(zip(prompts, answers, strict=True), 1):
        said = prompt + between if isinstance(prompt, str) else f"{_last(prompt)}\n"
        _write(f"--- {number}\n{said}{one.text}\n")


def _write_all(path: Path, prompts: list[Asked], answers: Iterator[Any]) -> None:
    """Write each answer once it and all before it have ended; after a failure print where they are."""
    from expertmesh.data.data_progress import Progress

    with told_of_data(), kept(path, total=len(prompts), unit="texts") as file:
        progress = Progress("continued", total=len(prompts), unit="texts")
        for prompt, one in zip(prompts, progress.over(answers), strict=True):
            file.write(_line(prompt, one))


def _parse(argv: list[str]) -> Any:
    """Parsed options; suggests a fix if a prompt was taken for an option."""
    try:
        options = _parser().parse_args(argv)
        check_least(options, batch_size=1)
    except ConfigError as error:
        if not argv or not str(error).startswith(f"unknown option {argv[-1]}; see"):
            raise
        raise ConfigError(_NO_PROMPT) from None
    ways = [bool(options.prompt), options.input is not None, options.interactive]
    if not any(ways):
        raise ConfigError(_NO_PROMPT)
    if sum(ways) > 1:
        raise ConfigError(
            "prompts, --input and --interactive are three ways to say the same; use one of them"
        )
    if options.output is not None and options.interactive:
        raise ConfigError(
            f"--output {options.output}: has no effect with --interactive; leave one of them out"
        )
    if options.chat and options.no_start:
        raise ConfigError(
            "--no-start: has no effect with --chat, where the chat format says what comes first; leave one of them out"
        )
    if eplb_of(options) and not shared_by(options).keys() - {"es_degree"}:
        raise ConfigError(
            "--enable-eplb: is about processes that share a model by --parallel options; start them with torchrun, or leave it out"
        )
    options.chat_template_kwargs = variables_of(options.chat_template_kwargs)
    for name in ("temperature", "top_k", "top_p", "min_p"):
        value = getattr(options, name)
        if options.greedy and value is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {value}: has no effect with --greedy; leave one of them out"
            )
    greedy = {"temperature": 0.0} if options.greedy else {}
    options.params = SamplingParams(**TEXT_DEFAULTS | fields_of(SamplingParams, options) | greedy)
    return options


def _parser() -> OptionParser:
    parser = OptionParser(
        prog="expertmesh generate",
        description="Continues a text with the newest checkpoint of a run, or with a model as the hub has it.",
        epilog=_EXAMPLES,
    )
    parser.add_run(
        "prompt",
        metavar="PROMPT",
        help="text to continue, or several; - alone reads it from standard input",
    )
    parser.add_argument(
        "--input",
        "--prompt-file",
        metavar="FILE",
        help="a prompt on each line; of a .jsonl or .json file objects with prompt, or with messages as for --chat",
    )
    parser.add_argument(
        "--output",
        metavar="FILE.jsonl",
        help="write an object with prompt, text and finish_reason for each prompt into a file, instead of printing",
    )
    parser.add_argument(
        "--interactive",
        action="store_true",
        help="ask for prompts until the end of the input; with --chat as one conversation",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is what a user says: the model answers as it learned from conversations",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the model's chat template, for example '{\"enable_thinking\": false}' of Qwen3",
    )
    parser.add_argument(
        "--no-start",
        action="store_true",
        help="put nothing before a prompt (what the tokenizer puts there; the end of text, of a run that was not converted)",
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="greedy decoding: always the most likely token",
    )
    names = [name for name in SamplingParams.model_fields if name not in OF_OUTPUTS]
    add_fields(parser, SamplingParams, names, **TEXT_DEFAULTS)
    parser.add_argument("--max-new-tokens", dest="max_tokens", type=int, help=SUPPRESS)
    parser.add_argument(
        "--batch-size", type=int, default=32, metavar="N", help="prompts at a time (32)"
    )
    add_place(parser)
    add_ranks(parser, "tp_degree", "ep_degree")
    add_fields(parser, EngineConfig, (*EPLB, "num_draft_tokens", "expert_slots"))
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="answer with a low-rank adapter, as peft saves it"
    )
    return parser


def _last(messages: list[dict[str, Any]]) -> str:
    from expertmesh.text.chat import read_messages

    content: str = read_messages(messages)[-1]["content"]
    return content


def _line(prompt: Asked, output: Any) -> str:
    """Answer as a line of JSON."""
    key = "prompt" if isinstance(prompt, str) else "messages"
    found = {key: prompt, "text": output.text, "finish_reason": output.finish_reason}
    return json.dumps(found, ensure_ascii=False) + "\n"


def _write(text: str) -> None:
    print(text, end="", flush=True)
