"""Regular expressions of JSON schemas: ECMA-262's, of which the compiler's and other programs' readings differ."""

import re

_SPACES = r"\t\n\x0b\x0c\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_ANY_SPACES = _SPACES + r"\x1c-\x1f\x85\ufeff"
_WORDS = r"0-9A-Za-z_\p{L}\p{N}\p{M}\p{Pc}"
_LEAST = {
    "s": f"[{_SPACES}]",
    "S": f"[^{_ANY_SPACES}]",
    "d": "[0-9]",
    "D": r"[^\p{N}]",
    "w": "[0-9A-Za-z_]",
    "W": f"[^{_WORDS}]",
}
"""Characters that a class has in all readings: some know ASCII alone, some all of Unicode."""
_MOST = {
    "s": f"[{_ANY_SPACES}]",
    "S": f"[^{_SPACES}]",
    "d": r"\p{N}",
    "D": "[^0-9]",
    "w": f"[{_WORDS}]",
    "W": "[^0-9A-Za-z_]",
}
"""Characters that a class has in any reading, for classes that are left out: [^...]."""
_DOT = r"[^\n\r\u2028\u2029]"
_PART = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[pP]\{[A-Za-z_=]+\}|.|$)|\[\^?|&&|--|~~|.", re.DOTALL)
_SET_OPERATIONS = ("[", "[^", "&&", "--", "~~")
_POSSESSIVE = re.compile(r"(?<!\\)[*+?}]\+")
_GROUP = re.compile(r"\?(:|P?<[A-Za-z]\w*>)")


def readable_pattern(pattern: str) -> str:
    """A regular expression that the compiler reads as ECMA-262 does, or more strictly."""
    if (twice := _POSSESSIVE.search(pattern)) is not None:
        raise ValueError(f"{twice[0]!r} has another meaning elsewhere")
    found, at, inside = [], 0, ""
    while at < len(pattern):
        part = _PART.match(pattern, at)
        assert part is not None
        text, at = part[0], part.end()
        if text[0] == "\\":
            found.append(_escaped(text[1:], _MOST if inside == "[^" else _LEAST))
        elif inside:
            if text in _SET_OPERATIONS:
                raise ValueError(f"{text!r} within [...] has another meaning elsewhere; escape it")
            inside = "" if text == "]" else inside
            found.append(text)
        elif text[0] == "[":
            if pattern[at : at + 1] == "]":
                raise ValueError("an empty [] has another meaning elsewhere")
            inside = text
            found.append(text)
        elif text == "(" and pattern[at : at + 1] == "?" and not _GROUP.match(pattern, at):
            raise ValueError(f"{pattern[at - 1 : at + 3]!r} is not kept (no looking around, no flags)")
        else:
            found.append(_DOT if text == "." else text)
    return "".join(found)


def _escaped(part: str, classes: dict[str, str]) -> str:
    """An escape, given without its backslash, as the compiler reads it."""
    if part in classes:
        return classes[part]
    if part == "0":
        return r"\x00"
    if part and (len(part) > 1 or part in "nrtfv" or not (part.isalnum() or part in "<>")):
        return f"\\{part}"
    raise ValueError(f"\\{part} is not kept")
