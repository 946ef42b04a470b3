"""Wrapping of help texts to the terminal, without breaking words and commands."""

import re
import shutil
import textwrap

_ROOM = 32
"""Minimum columns for words beside others; with fewer they are placed below."""
_COLUMNS = re.compile(r"( *\S.*?  +)(\S.*)")
_QUOTED = r"""(?:"[^"]*"|'[^']*')"""
_COMMAND = re.compile(r"(.*?: )? *(expertmesh .*)")


def fitted(text: str, width: int | None = None) -> str:
    """Text with long lines wrapped: commands after a backslash, columns and sentences between words.

    Args:
        text: lines; "NAME  words" is two columns, "words:  expertmesh ..." and "  expertmesh ..." have a command.
        width: columns; None: the terminal's.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    indent = len(line) - len(line.lstrip())
    if width - indent < _ROOM < width:  # words below a long name
        indent = 4
        line = " " * indent + line.lstrip()
    if len(line) <= width:
        return [line]
    if line.startswith("usage: "):
        parts = re.findall(r"\[[^]]*\]|--\S+ \S+(?: \.\.\.)?|\S+", line)
        return _joined(parts, width)
    if line.lstrip().startswith(("expertmesh ", "torchrun ", "curl ")):
        return _command(line.lstrip(), indent, width)
    columns = _COLUMNS.fullmatch(line)
    if columns is None:
        return textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False)
    head, words = columns[1], columns[2]
    is_narrow = width - len(head) < _ROOM
    command = _COMMAND.fullmatch(words)
    if command is not None and command[1]:
        place = 2 if is_narrow else len(head)
        return [*_beside(head, command[1].rstrip(), width), *_command(command[2], place + 2, width)]
    if is_narrow:
        return [head.rstrip(), *_beside(" " * 4, words, width)]
    return _beside(head, words, width)


def _beside(head: str, words: str, width: int) -> list[str]:
    return textwrap.wrap(
        words,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _joined(parts: list[str], width: int) -> list[str]:
    """Parts joined to lines, each part unbroken."""
    lines = [""]
    for part in parts:
        space = " " if lines[-1].strip() else ""
        if space and len(lines[-1]) + len(space + part) > width:
            lines.append("  ")
            space = ""
        lines[-1] += space + part
    return lines


def _command(command: str, indent: int, width: int) -> list[str]:
    """Command wrapped to lines that a shell reads as one, broken before options, else before other words.

    A trailing comment is moved above: a shell reads a comment to the end of its line, including the backslash.
    """
    command, _, remark = command.partition(" # ")
    head = " " * indent + "# "
    above = textwrap.wrap(remark, width, initial_indent=head, subsequent_indent=head)
    lines = [" " * indent]
    parts = re.findall(rf"(?:--\S+(?: (?!--)(?:{_QUOTED}|\S+))*)|{_QUOTED}|\S+", command)
    if max(map(len, parts)) > width - indent - 6:  # long options: their values may be on separate lines
        parts = re.findall(rf"--\S+ (?!--)(?:{_QUOTED}|\S+)|{_QUOTED}|\S+", command)
    for part in parts:
        space = "" if lines[-1].isspace() else " "
        if space and len(lines[-1]) + len(space + part) + 2 > width:
            lines[-1] += " \\"
            lines.append(" " * (indent + 4))
            space = ""
        lines[-1] += space + part
    return above + lines
