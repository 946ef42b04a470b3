"""Mistakes made from the option classes: every bound, choice and type of every field is refused in one line, before
anything is done."""

import os
import types
import typing

import annotated_types as bounds
import pytest
from pydantic import BaseModel
from tests.support.known_rows import known

from expertmesh.cli.main import main
from expertmesh.config.values import written
from expertmesh.models.registry import FAMILIES

RECIPES = known({"gpt-moe-test": "gpt", "translate-test": "seq2seq", "swin-test": "swin"})
PATHS = (
    *("--data.path", "--data.encode-with", "--data.cache-dir", "--data.tokenizer"),
    *("--train.run-dir", "--train.init-from", "--train.branch-from", "--distill.teacher"),
)
LATER = ("--data.tokenizer", "--train.branch-from")
"""Paths that are looked at when other options fit."""
LEAST = 580 + 60 * (len(RECIPES) - 1)
"""Mistakes that are made at least: a walk that lost a section would make fewer."""


def leaves(config, prefix=""):
    """(option, field) of all options of a configuration."""
    for name, field in config.model_fields.items():
        value, words = field.annotation, f"{prefix}{name.replace('_', '-')}"
        if isinstance(value, type) and issubclass(value, BaseModel):
            yield from leaves(value, f"{words}.")
        elif prefix:
            yield f"--{words}", field


def kinds(annotation):
    """What a value may be, or one of several, without None: types, and the words of choices."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType, tuple):
        parts = (part for part in typing.get_args(annotation) if part is not Ellipsis)
        return {kind for part in parts for kind in kinds(part)}
    if origin is typing.Literal:
        return {"choice"}
    return set() if annotation is type(None) else {annotation}


def choices(annotation):
    """The words of choices inside an annotation."""
    if typing.get_origin(annotation) is typing.Literal:
        return typing.get_args(annotation)
    return tuple(word for part in typing.get_args(annotation) for word in choices(part))


def rules(field):
    """Bounds of the field, or of each of its values."""
    yield from field.metadata
    parts = [field.annotation]
    for part in parts:  # which grows
        parts += [one for one in typing.get_args(part) if typing.get_origin(part) is not None]
        if typing.get_origin(part) is typing.Annotated:
            for rule in part.__metadata__:
                yield from getattr(rule, "metadata", (rule,))


def wrong_values(option, field):
    """(value, what the message must say) of one field, by its type and bounds."""
    found = kinds(field.annotation)
    if found == {"choice"}:
        yield "zzz", "one of"
        longest = max(map(str, choices(field.annotation)), key=len)
        if len(longest) > 3:
            yield longest[:-2] + longest[-1], f"did you mean {longest}?"
    if found == {bool}:
        yield "maybe", "true or false"
    if found == {int}:
        yield "1.5", "whole number"
        if not any(isinstance(rule, bounds.Lt | bounds.Le) for rule in rules(field)):
            for value in (2**63, 10**19, 10**400 - 1):
                yield str(value), "at most 2^63 - 1"
    if found == {float}:
        for value in ("fast", "nan", "inf", "5%"):
            yield value, "finite number"
    if found & {int, float} and found <= {int, float}:
        for rule in rules(field):
            match rule:
                case bounds.Gt(gt=least):
                    yield f"{least}", f"greater than {written(least)}"
                case bounds.Ge(ge=least):
                    yield f"{least - 1}", f"at least {written(least)}"
                case bounds.Lt(lt=most):
                    for value in (most, 9 * 10**19):
                        yield f"{value}", f"less than {written(most)}"
                case bounds.Le(le=most):
                    for value in (most + 1, 1e300 if found == {float} else max(most + 1, 10**8)):
                        yield f"{value}", f"at most {written(most)}"
    if option in PATHS:
        yield "", "empty"
        if option not in LATER:
            yield "~nosuchuser/x", "no such user"
        yield os.fsdecode(b"caf\xe9"), "UTF-8"


def mistakes():
    """(recipe, option, value, what it says), each option once."""
    seen = set()
    for name, family in RECIPES.items():
        for option, field in leaves(FAMILIES[family].config):
            if option not in seen:
                seen.add(option)
                for value, rule in wrong_values(option, field):
                    yield name, option, value, rule


MISTAKES = list(mistakes())
SECTIONS = sorted({option.split(".")[0] for _, option, _, _ in MISTAKES})


def test_all_are_made():
    assert len(MISTAKES) >= LEAST


@pytest.mark.parametrize("section", SECTIONS)
def test_what_a_field_cannot_be_is_refused_in_one_line(section, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    wrong = []
    for recipe, option, value, rule in MISTAKES:
        if option.split(".")[0] != section:
            continue
        code = main(["train", recipe, option, value])
        error = capsys.readouterr().err
        shown = value.encode(errors="backslashreplace").decode()[:50]  # of a long one the beginning
        said = (rule, shown, ";") if value.startswith("~") else (option, rule, shown, ";")
        says = error.startswith("error: ") and all(text in error for text in said)
        if code != 2 or error.count("\n") != 1 or not says:
            wrong.append((option, value, rule, error))
    assert wrong == []
    assert list(tmp_path.iterdir()) == []
