"""Mistakes as a table: what is called, what it must say, and that it leaves everything as it was."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.place import Place


def digest(folder: Path) -> dict[str, str]:
    """What every file, link or pipe below a folder is, but for the lock, which holds the number of the last process."""
    return {
        str(path.relative_to(folder)): _kind(path)
        for path in sorted(folder.rglob("*"))
        if path.name != "lock" and (path.is_symlink() or not path.is_dir())
    }


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"link to {path.readlink()}"
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    return f"mode {path.stat().st_mode:o}"


# What a mistake needs before the call; returns the words of the call.
Words = Callable[[Place], list[str]]


@dataclass
class Mistake:
    words: Words
    says: list[str]
    code: int = 2
    # Folders in which the call may add files (never change any), and files that a run which fails later may continue.
    may_add: tuple[str, ...] = ()
    may_continue: tuple[str, ...] = ()


def plain(*words: str) -> Words:
    return lambda place: list(words)


def training(*words: str) -> Words:
    return lambda place: place.train(*words)


def wrong_value(option: str, value: str, *rule_and_fix: str) -> Mistake:
    """A value that an option of training cannot have; the message names both beside the rule and the fix."""
    return Mistake(training(option, value), [f"{option} {value}", *rule_and_fix])


def reseal(checkpoint: Path) -> None:
    """Writes a manifest that fits the files of a checkpoint as they are now."""
    manifest = checkpoint / "manifest.json"
    values = json.loads(manifest.read_text())
    for name in values["files"]:
        data = (checkpoint / name).read_bytes()
        values["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(values))


def check(mistake: Mistake, code: int, errors: str, before: dict[str, str], after: dict[str, str]) -> None:
    # A slow machine says how far it is ("written for the page 63 of 63 tokens") before it meets the mistake.
    lines = [line for line in errors.splitlines() if not re.fullmatch(r".+ [\d,.]+ of [\d,.]+ [\w ]+", line)]
    assert code == mistake.code, errors
    assert len(lines) == 1, errors
    assert lines[0].startswith("error: ")
    assert ";" in lines[0], f"no fix in: {lines[0]}"
    assert "Traceback" not in lines[0]
    assert "unexpected" not in lines[0].replace("unexpected word", ""), lines[0]
    assert "--debug" not in lines[0], f"the catch-all: {lines[0]}"
    assert [text for text in mistake.says if text not in lines[0]] == [], lines[0]
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed <= set(mistake.may_continue), f"overwritten: {changed}"
    added = {name for name in set(after) - set(before) if not name.startswith(mistake.may_add)}
    assert added == set(), f"left behind: {added}"
