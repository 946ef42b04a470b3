"""Mistakes made from the option classes: every bound, choice and type of every field is refused in one line, before anything is done."""

import types
import typing

import annotated_types as bounds
import pytest
from pydantic import BaseModel

from expertmesh.cli.main import main
from expertmesh.models.gpt.recipes import RECIPES as GPTS
from expertmesh.models.seq2seq.recipes import RECIPES as TRANSLATIONS
from expertmesh.models.swin.recipes import RECIPES as IMAGES

RECIPES = {"gpt-moe-test": GPTS, "translate-test": TRANSLATIONS, "swin-test": IMAGES}
LEAST = 400
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
    """What a value may be, without None: types, and the words of choices."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return {kind for part in typing.get_args(annotation) for kind in kinds(part)}
    if typing.get_origin(annotation) is typing.Literal:
        return {"choice"}
    return set() if annotation is type(None) else {annotation}


def wrong_values(field):
    """(value, what the message must say) of one field, by its type and bounds."""
    found = kinds(field.annotation)
    if found == {"choice"}:
        yield "zzz", "one of"
    if found == {bool}:
        yield "maybe", "true or false"
    if found == {int}:
        yield "1.5", "whole number"
    if found == {float}:
        for value in ("fast", "nan", "inf", "5%"):
            yield value, "finite number"
    if found & {int, float} and found <= {int, float}:
        for rule in field.metadata:
            match rule:
                case bounds.Gt(gt=least):
                    yield f"{least}", f"greater than {least:g}"
                case bounds.Ge(ge=least):
                    yield f"{least - 1}", f"at least {least:g}"
                case bounds.Lt(lt=most):
                    yield f"{most}", f"less than {most:g}"
                case bounds.Le(le=most):
                    yield f"{most + 1}", f"at most {most:g}"


def mistakes():
    """(recipe, option, value, what it says), each option once."""
    seen = set()
    for recipe, known in RECIPES.items():
        for option, field in leaves(type(known[recipe]())):
            if option not in seen:
                seen.add(option)
                for value, rule in wrong_values(field):
                    yield recipe, option, value, rule


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
        says = error.startswith("error: ") and all(t in error for t in (option, value, rule, ";"))
        if code != 2 or error.count("\n") != 1 or not says:
            wrong.append((option, value, rule, error))
    assert wrong == []
    assert list(tmp_path.iterdir()) == []
