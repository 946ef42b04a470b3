"""Rows of mixed tables that speak of a family, which are left out where the registry does not know it."""

import re
from typing import Any

from expertmesh.models.registry import FAMILIES

_WORDS = {
    "seq2seq": "translat|seq2seq|num_beams|data.languages|data.pairs",
    "swin": "swin|classif|images",
}
_ABSENT = [re.compile(words) for name, words in _WORDS.items() if name not in FAMILIES]


def known(table: Any) -> Any:
    """The rows of a list or a dictionary in whose text no absent family is named."""
    if isinstance(table, dict):
        return dict(known(list(table.items())))
    return [row for row in table if not any(words.search(str(row)) for words in _ABSENT)]
