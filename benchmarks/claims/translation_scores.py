"""Scores of translations beyond `translate --reference`: ROUGE of headings, intervals, and whether two systems differ.

    python -m benchmarks.claims.translation_scores out.de --reference test.de --language de --rouge
    python -m benchmarks.claims.translation_scores out.de --reference test.de --language de --compare other.de

Lines whose reference is blank, which is not translated then, are not scored. ROUGE needs the package rouge-score.
"""

import argparse
import importlib.util
import logging
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from expertmesh_families.seq2seq.parallel_text import read_lines
from expertmesh.errors import ConfigError
from expertmesh_families.seq2seq.scores import TOKENIZERS, check_lines, metrics_of, plain_language

BY_CHARACTER = (*TOKENIZERS, "th", "lo", "km", "my")
"""Languages that ROUGE compares by character: sacreBLEU's, and Thai, Lao, Khmer and Burmese, which have no blanks between words."""


class Score(NamedTuple):
    """One metric.

    Attributes:
        name: as its package prints it.
        value: from 0 to 100.
        signature: all that it depends on.
        interval: half of its 95% interval by bootstrap; None: not asked for.
        p_value: of the difference to another system's; None: there is none.
    """

    name: str
    value: float
    signature: str
    interval: float | None = None
    p_value: float | None = None


def compare(
    hypotheses: Sequence[str],
    others: Sequence[str],
    references: Sequence[str],
    *,
    language: str,
    num_samples: int = 1000,
) -> tuple[list[Score], list[Score]]:
    """The same for two systems, with intervals and the p-value of the difference by paired bootstrap (Koehn 2004).

    Args:
        hypotheses: translations of one system, one line each.
        others: of the system that it is compared with.
        references: as many lines of the language.
        language: its code, which decides on BLEU's tokenizer.
        num_samples: of the bootstrap.

    Returns:
        Scores of the other system, then of this one, which have the p-values.

    Raises:
        ConfigError: sacreBLEU is not installed, or there are no translations or not as many references.
    """
    metrics = metrics_of(hypotheses, references, language)
    metrics_of(others, references, language)
    from sacrebleu.significance import PairedTest

    logging.getLogger("sacrebleu").setLevel(logging.WARNING)
    test = PairedTest(
        [("other", list(others)), ("this", list(hypotheses))],
        {type(metric).__name__: metric for metric in metrics},
        [list(references)],
        test_type="bs",
        n_samples=num_samples,
    )
    signatures, results = test()
    sides: tuple[list[Score], list[Score]] = [], []
    for name, values in results.items():
        if name == "System":
            continue
        results_of: Any = values
        for side, result in zip(sides, results_of, strict=True):
            signature = signatures[name].format(short=True)
            side.append(Score(name, result.score, signature, result.ci, result.p_value))
    for place, (theirs, ours) in enumerate(zip(*sides, strict=True)):
        if theirs.value == ours.value:  # which sacreBLEU calls as significant as it can be
            sides[1][place] = ours._replace(p_value=1.0)
    return sides


ROUGE = ("rouge1", "rouge2", "rougeL")


class _Words:
    """Words in lower case, of any script; single characters with their marks where a language has no blanks between words."""

    def __init__(self, *, by_character: bool) -> None:
        self._by_character = by_character

    def tokenize(self, text: str) -> list[str]:
        """What ROUGE compares, in Unicode's composed form (NFC), so that one way to write a letter equals another."""
        found: list[str] = []
        inside = False
        for letter in unicodedata.normalize("NFC", text.lower()):
            kind = unicodedata.category(letter)
            is_letter = letter.isalnum() or letter == "_"
            if is_letter and (self._by_character or not inside):
                found.append(letter)
                inside = True
            elif inside and (is_letter or kind.startswith("M")):
                found[-1] += letter
            elif kind != "Cf" or letter == _BLANK_WITHOUT_WIDTH:
                inside = False  # joiners and other marks of format neither show nor end a word
        return found


_BLANK_WITHOUT_WIDTH = "\u200b"


def rouge(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    language: str,
    others: Sequence[str] | None = None,
    num_samples: int = 1000,
) -> list[tuple[Score, Score | None]]:
    """ROUGE-1, -2 and -L: means over the lines of the F-measure (Lin 2004), by Google's package rouge-score, without stemming.

    Args:
        hypotheses: one line each.
        references: as many lines of the language.
        language: its code; those of `BY_CHARACTER` are compared by characters. What follows "_" or "-" is of no account.
        others: of another system, to compare with.
        num_samples: of the paired bootstrap (Koehn 2004), with which intervals and p-values come where there are others.

    Returns:
        For each measure this system's, with the p-value of the difference, and the other's.

    Raises:
        ConfigError: rouge-score is not installed, or there are no lines or not equally many.
    """
    check_rouge()
    for lines in (hypotheses, others):
        if lines is not None:
            check_lines(lines, references, "lines")
    from importlib.metadata import version

    from rouge_score.rouge_scorer import RougeScorer

    by_character = plain_language(language) in BY_CHARACTER
    scorer = RougeScorer(list(ROUGE), tokenizer=_Words(by_character=by_character))
    words = "char" if by_character else "word"
    signature = f"stem:no|case:lc|tok:{words}|v:{version('rouge-score')}"

    def measured(lines: Sequence[str]) -> np.ndarray:
        scores = [scorer.score(right, ours) for right, ours in zip(references, lines, strict=True)]
        return np.array([[100 * one[name].fmeasure for name in ROUGE] for one in scores])

    ours = measured(hypotheses)
    theirs = None if others is None else measured(others)
    found: list[tuple[Score, Score | None]] = []
    for column, name in enumerate(ROUGE):
        mine = ours[:, column]
        if theirs is None:
            found.append((Score(name, float(mine.mean()), signature), None))
            continue
        other = theirs[:, column]
        drawn = np.random.default_rng(0).integers(len(mine), size=(num_samples, len(mine)))
        gains, gain = (mine - other)[drawn].mean(1), float((mine - other).mean())
        p_value = float((np.abs(gains - gain) >= abs(gain)).sum() + 1) / (num_samples + 1)
        sides = [
            (float(values.mean()), 1.96 * float(values[drawn].mean(1).std()))
            for values in (mine, other)
        ]
        found.append(
            (
                Score(name, sides[0][0], signature, sides[0][1], p_value),
                Score(name, sides[1][0], signature, sides[1][1]),
            )
        )
    return found


def check_rouge() -> None:
    """Whether there can be ROUGE.

    Raises:
        ConfigError: rouge-score is not installed.
    """
    if importlib.util.find_spec("rouge_score") is None:
        raise ConfigError(
            "ROUGE needs the package rouge-score; install it with: pip install rouge-score"
        )


def shown(result: Score) -> str:
    text = f"{result.name} {result.value:.2f}"
    if result.interval is not None:
        text += f" +- {result.interval:.2f}"
    if result.p_value is not None:
        text += f" (p = {result.p_value:.4f})"
    return f"{text}  {result.signature}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims.translation_scores",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("found", type=Path, metavar="FILE", help="translations, a line each")
    parser.add_argument("--reference", type=Path, required=True, metavar="FILE")
    parser.add_argument("--language", required=True, metavar="LANG", help="of the translations")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="another system's lines")
    parser.add_argument("--rouge", action="store_true", help="ROUGE, too")
    options = parser.parse_args(argv)
    if options.compare is None and not options.rouge:
        parser.error("neither --rouge nor --compare; BLEU and chrF alone: translate --reference")
    try:
        _print(options)
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _print(options: argparse.Namespace) -> None:
    names = [options.found, options.reference, options.compare or options.found]
    files = [read_lines(name) for name in names]
    for lines in files:
        check_lines(lines, files[1], "lines")
    kept = [i for i, right in enumerate(files[1]) if right.strip()]
    if left_out := len(files[1]) - len(kept):
        print(f"note: {left_out:,} lines have no reference and are not scored", file=sys.stderr)
    ours, references, theirs = ([lines[i] for i in kept] for lines in files)
    others = None if options.compare is None else theirs
    pairs: list[tuple[Score, Score | None]] = []
    if others is not None:
        sides = compare(ours, others, references, language=options.language)
        pairs += zip(sides[1], sides[0], strict=True)
    if options.rouge:
        pairs += rouge(ours, references, language=options.language, others=others)
    for mine, other in pairs:
        print(shown(mine) if other is None else f"other {shown(other)}\nthis  {shown(mine)}")


if __name__ == "__main__":
    sys.exit(main())
