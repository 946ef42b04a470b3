"""Counts written with a unit: 8k, 4M, 1T. Never imports torch."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator

from expertmesh.config.base import FieldError

_UNITS = "kMGT"
_COUNT = re.compile(r"([0-9]+(?:[.][0-9]+)?) ?([kKmMgGbBtT])")


def counted(text: str, *, base: int) -> float:
    """A number from a text with a unit; a text without one as it is.

    Args:
        text: digits with k, M, G (or B) or T.
        base: 1000, or 1024 for lengths.

    Example:
        >>> from expertmesh.config.counted import counted
        >>> counted("8k", base=1024), counted("1.5T", base=1000)
        (8192.0, 1500000000000.0)
    """
    found = _COUNT.fullmatch(text.strip())
    if found is None:
        try:
            return float(text)
        except ValueError:
            rule = "must be a number, or one with k, M, G or T such as 8k or 1.5T"
            raise FieldError((), text, rule, "write one") from None
    place = _UNITS.lower().index(found[2].lower().replace("b", "g")) + 1
    result: float = float(found[1]) * base**place
    return result


def _whole(value: Any) -> Any:
    number = counted(value, base=1024) if isinstance(value, str) else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _decimal(value: Any) -> Any:
    return counted(value, base=1000) if isinstance(value, str) else value


Length = Annotated[int, BeforeValidator(_whole)]
"""Whole number of tokens or requests, also as 8k (8,192) or 4M (4,194,304)."""
Amount = Annotated[float, BeforeValidator(_decimal)]
"""Number of tokens in all, also as 2B (2,000,000,000) or 1T."""
