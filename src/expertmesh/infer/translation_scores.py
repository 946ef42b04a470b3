"""How good translations are: BLEU and chrF as sacreBLEU computes them (Post 2018), with its signatures."""

import importlib.util
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from expertmesh.errors import ConfigError

TOKENIZERS = {"zh": "zh", "ja": "char", "ko": "char"}
"""sacreBLEU's tokenizer for languages without blanks between words; all others have 13a."""


class Score(NamedTuple):
    """One metric.

    Attributes:
        name: as sacreBLEU prints it.
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


def score(hypotheses: Sequence[str], references: Sequence[str], *, language: str) -> list[Score]:
    """Corpus BLEU and chrF.

    Args:
        hypotheses: translations, one line each.
        references: as many lines of the language.
        language: its code, which decides on BLEU's tokenizer.

    Raises:
        ConfigError: sacreBLEU is not installed, or there are not as many references.
    """
    found = []
    for metric in _metrics(hypotheses, references, language):
        result = metric.corpus_score(list(hypotheses), [list(references)])
        found.append(Score(result.name, result.score, metric.get_signature().format(short=True)))
    return found


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
        hypotheses: of one system.
        others: of the system that it is compared with.
        references: see `score`.
        language: see `score`.
        num_samples: of the bootstrap.

    Returns:
        Scores of the other system, then of this one, which have the p-values.

    Raises:
        ConfigError: see `score`.
    """
    metrics = _metrics(hypotheses, references, language)
    _metrics(others, references, language)
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


def check_sacrebleu() -> None:
    """Whether there can be scores.

    Raises:
        ConfigError: sacrebleu is not installed.
    """
    if importlib.util.find_spec("sacrebleu") is None:
        raise ConfigError(
            "scores need the package sacrebleu; install it with: pip install sacrebleu"
        )


def _metrics(hypotheses: Sequence[str], references: Sequence[str], language: str) -> list[Any]:
    check_sacrebleu()
    if len(hypotheses) != len(references):
        raise ConfigError(
            f"{len(hypotheses):,} translations and {len(references):,} references: must be equally many; give one line for each"
        )
    from sacrebleu.metrics import BLEU, CHRF

    return [BLEU(tokenize=TOKENIZERS.get(language, "13a")), CHRF()]
