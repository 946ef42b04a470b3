"""`expertmesh generate RUN "prompt"`: continue a text with the newest checkpoint of a run, or with a hub model."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import model_validator

from expertmesh.cli.decoding import OnDevice, kept, load_adapter, open_decoder, say_precision
from expertmesh.cli.parse import parsed
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
from expertmesh.config.base import expanded
from expertmesh.config.engine import DecodingConfig
from expertmesh.config.fields import Flat, Folder, ModelFolder, NewFile, Positive, Spelling
from expertmesh.config.launched import launched_rank
from expertmesh.config.run import ServingDegrees
from expertmesh.config.sampling import OF_OUTPUTS, TEXT_DEFAULTS, SamplingParams
from expertmesh.errors import ConfigError, command, text_of

if TYPE_CHECKING:
    from expertmesh.engine.engine import Engine
    from expertmesh.runs.open import LoadedModel

_NO_TALK = (
    "has no chat template and no tokens for roles; unless it learned conversations with a tokenizer of its own "
    "choice, it does not know how to answer"
)
_ROOM = 4
"""Inverse share of the model's maximum length that a conversation leaves for the answer: 1 / 4."""
_FORGETS = "the oldest turns are forgotten: the model has room for {} tokens, the answer among them"
_NO_PROMPT = "no prompt; write it last, and -- before one that begins with -: generate RUN -- '-x'"


class GenerateVerb(OnDevice):
    """Generates text with the newest checkpoint of a run, or with a Hugging Face model folder.

    examples:
      expertmesh generate runs/gpt-moe-demo "def main("
      expertmesh generate runs/gpt-moe-demo --temperature 0.7 --top-p 0.95 --seed 3 "import os"
      expertmesh generate runs/gpt-moe-demo --greedy --max-tokens 50 "class Test" "def main("
      expertmesh generate runs/gpt-moe-demo --input prompts.txt   # a prompt on each line
      expertmesh generate runs/chat --chat --input asked.jsonl --output answered.jsonl
      expertmesh generate runs/gpt-moe-demo --interactive
      expertmesh generate models/Qwen3-30B-A3B "import os"   # a Hugging Face folder
      expertmesh generate runs/chat --chat "What is 2 + 2?"   # a run trained on conversations
      torchrun --nproc-per-node 8 -m expertmesh generate runs/qwen3 "def main("   # experts sharded over 8 GPUs
      torchrun --nproc-per-node 4 -m expertmesh generate runs/qwen3 --parallel.tp-degree 2 "def main("   # attention too
    """

    run: ModelFolder
    """run directory, or a Hugging Face model folder"""
    prompt: Annotated[tuple[str, ...], Spelling("PROMPT", is_word=True, is_free=True)] = ()
    """prompts to continue; - alone reads one from standard input"""
    input: Annotated[str | None, Spelling("FILE", also=("prompt_file",), is_read=True)] = None
    """file with one prompt per line, or .jsonl/.json objects with the key prompt or (with --chat) messages"""
    output: Annotated[NewFile | None, Spelling("FILE.jsonl")] = None
    """JSON Lines file with prompt, text and finish_reason of each prompt (default: standard output)"""
    interactive: bool = False
    """read prompts interactively; with --chat, as one conversation"""
    chat: bool = False
    """apply the model's chat template; each prompt is a user message"""
    chat_template_kwargs: Annotated[str | None, Spelling("JSON")] = None
    """variables of the chat template, for example '{"enable_thinking": false}' for Qwen3"""
    no_start: bool = False
    """do not prepend a BOS token (default: the tokenizer decides; runs trained by ExpertMesh prepend the EOS token)"""
    greedy: bool = False
    """greedy decoding: always the most likely token"""
    sampling: Annotated[SamplingParams, Spelling(is_flat=True, hides=OF_OUTPUTS)] = SamplingParams(**TEXT_DEFAULTS)
    batch_size: Positive = 32
    """batch size in prompts"""
    adapter: Folder | None = None
    """folder of a low-rank adapter in peft's format"""
    engine: Annotated[DecodingConfig, Flat] = DecodingConfig()
    parallel: ServingDegrees = ServingDegrees()

    @model_validator(mode="after")
    def _check(self) -> Self:
        ways = [bool(self.prompt), self.input is not None, self.interactive]
        if not any(ways):
            raise ConfigError(_NO_PROMPT)
        if sum(ways) > 1:
            raise ConfigError("prompts, --input and --interactive exclude one another; use one of them")
        fix = "leave one of them out"
        self.require(
            self.output is None or not self.interactive,
            "output",
            "has no effect with --interactive",
            fix,
        )
        self.require(
            not (self.chat and self.no_start),
            "no_start",
            "has no effect with --chat, where the chat format says what comes first",
            fix,
        )
        self.require(
            not self.eplb or self.parallel.given().keys() - {"es_degree"},
            "engine.enable_eplb",
            "is about processes that share a model by --parallel options",
            "start them with torchrun, or leave it out",
        )
        for name in ("temperature", "top_k", "top_p", "min_p"):
            is_idle = "sampling" in self.model_fields_set and name in self.sampling.model_fields_set
            self.require(
                not (self.greedy and is_idle),
                f"sampling.{name}",
                "has no effect with --greedy",
                fix,
            )
        variables_of(self.chat_template_kwargs)
        return self

    @property
    def params(self) -> SamplingParams:
        """Options of each request."""
        given = self.sampling.model_dump(include=self.sampling.model_fields_set)
        greedy = {"temperature": 0.0} if self.greedy else {}
        return SamplingParams(**TEXT_DEFAULTS | given | greedy)

    @property
    def variables(self) -> dict[str, Any]:
        """Variables of the chat template."""
        return variables_of(self.chat_template_kwargs)

    @property
    def eplb(self) -> dict[str, Any]:
        """Options of the placement of experts that were set, as fields of `EngineConfig`."""
        names = {"enable_eplb", "num_redundant_experts", "eplb_step_interval"}
        return self.engine.model_dump(include=self.engine.model_fields_set & names)


def run(argv: list[str]) -> int:
    """Print, or write with --output, each prompt and its continuation; a single one is printed as a stream. Returns
    0."""
    with once_per_host():
        options = _parse(argv)
    prompts = prompts_of(options) if launched_rank()[0] == 0 else []
    num_rows = min(len(prompts) or 1, options.batch_size)
    with ExitStack() as stack:
        with told_of_data():
            opened = stack.enter_context(open_decoder(options, num_rows=num_rows, is_asked=options.interactive))
        if opened.shared is None:
            _generate(options, opened.ranks.on_rank0(lambda: prompts), opened)
        else:
            _generate_together(options, prompts, opened)
    return 0


def _generate_together(options: GenerateVerb, prompts: list[Prompt], opened: "LoadedModel") -> None:
    """Continue texts on ranks that share the model: rank 0 has the texts, the others follow it."""
    from expertmesh.engine.engine import Engine

    text = opened.text
    with opened.precision.autocast():
        engine = Engine(
            opened.decoder,
            text.tokenizer,
            end_ids=text.end_ids,
            max_sequences=options.batch_size,
            num_draft_tokens=options.engine.num_draft_tokens,
            parallel=opened.shared,
            **options.eplb,
        )
        if not engine.leads:
            engine.follow()
            return
        with closing(engine):
            if options.adapter is not None:
                load_adapter(engine, options.adapter, options.adapter)
            _generate(options, prompts, opened, engine)


def _engine(options: GenerateVerb, opened: "LoadedModel") -> "Engine | None":
    """Engine for options that need one (draft tokens, adapters); None: not needed."""
    from expertmesh.engine.checks import why_not
    from expertmesh.engine.engine import Engine
    from expertmesh.engine.texts import writer

    if not options.engine.num_draft_tokens and options.adapter is None:
        return None
    size, guesses = options.batch_size, options.engine.num_draft_tokens
    made = writer(opened.decoder, opened.text, batch_size=size, num_draft_tokens=guesses)
    if not isinstance(made, Engine):
        raise ConfigError(f"--adapter {options.adapter}: {why_not(opened.decoder)}; leave it out")
    if options.adapter is not None:
        load_adapter(made, options.adapter, options.adapter)
    return made


def _generate(
    options: GenerateVerb,
    prompts: list[Prompt],
    opened: "LoadedModel",
    engine: "Engine | None" = None,
) -> None:
    """Continue texts; either all ranks have the same texts, or rank 0 has an engine that the others follow."""
    model, ranks = opened.decoder, opened.ranks
    import torch

    from expertmesh.engine.texts import continued, stream_text
    from expertmesh.models.decoder import EncoderDecoder
    from expertmesh.text.chat import latest_turns

    if isinstance(model, EncoderDecoder):
        raise ConfigError(f"run {options.run}: the model reads one text and writes another; use {command('translate')}")

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
        variables = options.variables
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
                _write_all(expanded(options.output), [one.asked for one in prompts], answers)
            else:
                for _ in answers:
                    pass


def _encoder(options: GenerateVerb, opened: "LoadedModel", params: SamplingParams) -> Callable[[Prompt], list[int]]:
    """Function that encodes a prompt and checks its length; its errors name the prompt's place."""
    from expertmesh.engine.checks import check_prompts, room_for
    from expertmesh.engine.texts import prompt_ids
    from expertmesh.text.messages import read_messages

    model, text, variables = opened.decoder, opened.text, options.variables
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
            room_for(model, ids, params.max_tokens)
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


def _parse(argv: list[str]) -> GenerateVerb:
    """Parsed options; suggests a fix if a prompt was taken for an option."""
    try:
        return parsed(GenerateVerb, argv)
    except ConfigError as error:
        if not argv or not str(error).startswith(f"unknown option {argv[-1]}; see"):
            raise
        raise ConfigError(_NO_PROMPT) from None


def _last(messages: list[dict[str, Any]]) -> str:
    from expertmesh.text.messages import read_messages

    content: str = read_messages(messages)[-1]["content"]
    return content


def _line(prompt: Asked, output: Any) -> str:
    """Answer as a line of JSON."""
    key = "prompt" if isinstance(prompt, str) else "messages"
    found = {key: prompt, "text": output.text, "finish_reason": output.finish_reason}
    return json.dumps(found, ensure_ascii=False) + "\n"


def _write(text: str) -> None:
    print(text, end="", flush=True)
