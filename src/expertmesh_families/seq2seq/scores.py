"""Scores of translations: BLEU and chrF by sacreBLEU (Post 2018), with its signatures."""

import importlib.util
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from expertmesh.config.values import type_of
from expertmesh.errors import ConfigError

_SHORTER = {
    **dict.fromkeys(("zho", "chi", "cmn", "yue"), "zh"),
    "jpn": "ja", "kor": "ko", "tha": "th", "lao": "lo", "khm": "km", "mya": "my", "bur": "my",
}  # fmt: skip
"""Two-letter code for three-letter codes of languages written without blanks between words: zho is zh."""
TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char"}
"""sacreBLEU's tokenizers for Chinese, Japanese and Korean; all other languages use 13a."""


class Score(NamedTuple):
    """Corpus score by one metric."""

    name: str  # name of the metric in sacreBLEU
    value: float  # score from 0 to 100
    signature: str  # sacreBLEU's signature, with all settings that the score depends on


def score(hypotheses: Sequence[str], references: Sequence[str], *, language: str) -> list[Score]:
    """Corpus BLEU and chrF. `language`: code of the target language, which selects BLEU's tokenizer."""
    found = []
    for metric in metrics_of(hypotheses, references, language):
        result = metric.corpus_score(list(hypotheses), [list(references)])
        found.append(Score(result.name, result.score, metric.get_signature().format(short=True)))
    return found


def check_sacrebleu() -> None:
    """Check that sacreBLEU is installed."""
    if importlib.util.find_spec("sacrebleu") is None:
        raise ConfigError("scores need the package sacrebleu; install it with: pip install sacrebleu")


def metrics_of(hypotheses: Sequence[str], references: Sequence[str], language: str) -> list[Any]:
    """sacreBLEU's BLEU and chrF for a language, after a check of the lines; see `score`."""
    check_sacrebleu()
    check_lines(hypotheses, references, "translations")
    from sacrebleu.metrics import BLEU, CHRF

    return [BLEU(tokenize=TOKENIZERS.get(plain_language(language), "13a")), CHRF()]


def plain_language(language: str) -> str:
    """Language code without region or script, as two letters if there are no blanks between words: "zh" for
    "zho_Hans"."""
    code = re.split("[_-]", language)[0].lower()
    return _SHORTER.get(code, code)


def check_lines(lines: Sequence[str], references: Sequence[str], what: str) -> None:
    """Check that there are lines, and as many references."""
    if len(lines) != len(references):
        raise ConfigError(
            f"{len(lines):,} {what} and {len(references):,} references: must be equally many; give one line for each"
        )
    for name, given in ((what, lines), ("references", references)):
        for line in given:
            if not isinstance(line, str):
                raise ConfigError(f"{name}: one is {type_of(line)}; there is one text for each, give it")
    if not lines:
        raise ConfigError(f"0 {what}: no score has a meaning; give at least one")
