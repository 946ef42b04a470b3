"""`expertmesh translate RUN --to de "..."`: translate with the newest checkpoint of a run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

from expertmesh.cli.decoding import OnDevice, kept, open_decoder, say_precision
from expertmesh.cli.parse import parsed
from expertmesh.cli.prompts import read_standard_input
from expertmesh.cli.terminal_progress import tell, told_of_data
from expertmesh.cli.torchrun import once_per_host
from expertmesh.config.base import expanded
from expertmesh.config.fields import ModelFolder, NewFile, Positive, Ratio, Spelling
from expertmesh.config.launched import launched_rank
from expertmesh.config.run import SlicesConfig
from expertmesh.data.files import lines_of
from expertmesh.errors import ConfigError

if TYPE_CHECKING:
    from expertmesh.runs.open import LoadedModel


class TranslateVerb(OnDevice):
    """Translates with the newest checkpoint of a run.

    examples:
      expertmesh translate runs/translate-multi30k --to de "Two dogs play in the snow."
      expertmesh translate runs/translate-multi30k --to de --input test.en --output out.de --reference test.de
    """

    run: ModelFolder
    """run directory"""
    text: Annotated[tuple[str, ...], Spelling("TEXT", is_word=True, is_free=True)] = ()
    """texts to translate; - reads one per line from standard input"""
    to: Annotated[str, Spelling("LANG")]
    """target language"""
    input: Annotated[str | None, Spelling("FILE", is_read=True)] = None
    """file with one text per line; - reads standard input"""
    output: NewFile | None = None
    """file for the translations (default: standard output)"""
    reference: Annotated[str | None, Spelling("FILE", is_read=True)] = None
    """file with reference translations: prints BLEU and chrF"""
    beams: Annotated[Positive, Spelling(stands_for=("num_beams",))] = 5
    """beam size of beam search"""
    length_penalty: Ratio = 1.0
    """exponent of the length penalty; larger: longer translations; 0: no penalty"""
    split_long: bool = False
    """split texts that are too long for the model into sentences"""
    batch_size: Positive = 32
    """batch size in texts"""
    parallel: SlicesConfig = SlicesConfig()


def run(argv: list[str]) -> int:
    """Print, or write with --output, a translation of each text; returns 0.

    With references scores are printed; without --output only they are.
    """
    with once_per_host():
        options = parsed(TranslateVerb, argv)
    is_first = launched_rank()[0] == 0
    texts, references = _texts(options) if is_first else ([], None)
    output = expanded(options.output) if options.output is not None and is_first else None
    if references is not None:
        from expertmesh_families.seq2seq.scores import check_sacrebleu, score

        check_sacrebleu()
    num_rows = options.beams * min(len(texts) or 1, options.batch_size)
    with (
        told_of_data(),
        open_decoder(options, num_rows=num_rows) as opened,
        nullcontext() if output is None else kept(output, total=len(texts), unit="texts") as file,
    ):
        is_told = False

        def write(line: str) -> None:
            """Write or print a translation as soon as it is finished."""
            nonlocal is_told
            if not is_told:
                say_precision(opened.precision)
            is_told = True
            if file is not None:
                file.write(f"{line}\n")
            elif references is None:
                print(line, flush=True)

        found = _translated(options, opened.ranks.on_rank0(lambda: texts), opened, write)
    if not is_first:
        return 0
    if references is not None:
        scored = _scored(texts, references)
        if left_out := len(texts) - len(scored):
            tell(f"note: {left_out:,} of {len(texts):,} lines are not scored: the text or its reference is blank")
        found, references = ([lines[i] for i in scored] for lines in (found, references))
        for name, value, signature in score(found, references, language=options.to):
            print(f"{name} {value:.2f}  {signature}")
    return 0


def _translated(options: Any, texts: list[str], opened: "LoadedModel", write: Callable[[str], None]) -> list[str]:
    tokenizer = opened.text.tokenizer
    translation = opened.task.builder.translation(tokenizer, to=options.to)
    import torch

    from expertmesh_families.seq2seq.translate import translate

    with torch.no_grad(), opened.precision.autocast():
        return translate(
            opened.decoder,
            tokenizer,
            translation,
            texts,
            num_beams=options.beams,
            length_penalty=options.length_penalty,
            batch_size=options.batch_size,
            split_long=options.split_long,
            each=write,
        )


def _texts(options: Any) -> tuple[list[str], list[str] | None]:
    """Texts to translate, and references of as many lines, or None."""
    if bool(options.text) == (options.input is not None):
        raise ConfigError("no text, or text and --input; give one of the two, for example 'a dog'")
    texts = list(options.text)
    if texts == ["-"] or options.input == "-":
        texts = lines_of(read_standard_input())
    elif options.input is not None:
        texts = _lines(options.input, "--input")
    for text in texts:
        try:
            text.encode()
        except UnicodeError:
            raise ConfigError(
                f"text {ascii(text)}: is not UTF-8; convert it, for example with iconv -t UTF-8"
            ) from None
    if options.reference is None:
        return texts, None
    references = _lines(options.reference, "--reference")
    if len(references) != len(texts):
        raise ConfigError(
            f"--reference {options.reference}: has {len(references):,} lines for {len(texts):,} texts; give the file "
            "that belongs to them"
        )
    if not _scored(texts, references):
        raise ConfigError(
            f"--reference {options.reference}: has no line for a text that is not blank, so there is nothing to "
            "score; give one"
        )
    return texts, references


def _scored(texts: list[str], references: list[str]) -> list[int]:
    """Indices of lines where text and reference are nonblank; parallel text has blank lines where a translation is
    missing."""
    pairs = zip(texts, references, strict=True)
    return [i for i, (text, right) in enumerate(pairs) if text.strip() and right.strip()]


def _lines(name: str, flag: str) -> list[str]:
    from expertmesh_families.seq2seq.parallel_text import read_lines

    path = expanded(name)
    if not path.is_file():
        raise ConfigError(f"{flag} {name}: is not a file; check the path")
    return read_lines(path)
