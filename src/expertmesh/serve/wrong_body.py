"""Errors of request bodies: the field and the reason that fit best what the client sent.

pydantic reports the errors of all forms that a field may have, under labels such as `list[TextPart]` or the name of a
class.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_MOST_NAME = 60
"""Maximum characters of a place in a message, whose keys are the client's."""
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type", "dict_attributes_type")
_FITS = ((float("inf"),),)


class _Error(NamedTuple):
    """Error at a place of the body."""

    steps: tuple[Any, ...]  # keys and indices to the place; with labels between them
    labels: tuple[bool, ...]  # whether each step is a label
    kind: str  # pydantic's type of the error
    text: str  # the reason

    def without(self, at: int) -> "_Error":
        """Error without the label at an index."""
        cut = [tuple(part for i, part in enumerate(all_) if i != at) for all_ in self[:2]]
        return self._replace(steps=cut[0], labels=cut[1])

    def misfit(self, at: int) -> tuple[int, ...] | None:
        """Order of the place below an index that has another type than the form; None: the value breaks another
        rule."""
        if self.kind != "missing" and not self.kind.endswith("_type"):
            return None
        real = [s for s, is_label in zip(self.steps, self.labels, strict=True) if not is_label][at:]
        if self.kind == "missing":
            real = real[:-1]
        return tuple(step if isinstance(step, int) else 0 for step in real)


def best_error(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str | None, str]:
    """Field and message of the error to report: the first one, of the form that fits the value furthest.

    Args:
        errors: errors as pydantic lists them, at least one; each place begins with "body".

    Returns:
        The field, None for the whole body; and the message, which begins with the place.
    """
    found = _narrowed([_read(error, body) for error in errors])
    first = found[0]
    place = ".".join(map(str, first.steps))[:_MOST_NAME]
    texts = list(dict.fromkeys(error.text for error in found))
    if len({error.steps for error in found}) > 1:  # one field of several must be there
        places = dict.fromkeys(".".join(map(str, error.steps)) for error in found)
        place, text = " or ".join(places), texts[0]
    else:
        same = "Input should be "
        are_alike = all(text.startswith(same) for text in texts)
        text = same + " or ".join(t.removeprefix(same) for t in texts) if are_alike else texts[0]
    name = str(first.steps[0])[:_MOST_NAME] if first.steps else None
    if first.kind == "refused":
        name = place
    if not place and first.kind == "missing":
        text = "the body is empty; send a JSON object"
    return name, f"{place}: {text}" if place else text


def _read(error: Mapping[str, Any], body: Any) -> _Error:
    """Error with its steps told apart from labels by walking through the body."""
    steps = [part for i, part in enumerate(error["loc"]) if i or part != "body"]
    if error["type"] == "refused":  # of a whole object, by one of its fields
        steps.append(error["ctx"]["field"])
    labels, value = [], body
    for i, step in enumerate(steps):
        is_last = i == len(steps) - 1
        is_index = isinstance(value, list) and isinstance(step, int) and step < len(value)
        if is_index or (isinstance(value, dict) and step in value):
            value = value[step]
        elif not (is_last and error["type"] == "missing"):
            labels.append(True)
            continue
        labels.append(False)
    text = "Input should be an object" if error["type"] in _NO_OBJECT else str(error["msg"])
    return _Error(tuple(steps), tuple(labels), str(error["type"]), text)


def _narrowed(errors: list[_Error]) -> list[_Error]:
    """The first error, of its best form; several if some forms fit equally little."""
    first = errors[0]
    if True not in first.labels:
        return [first]
    at = first.labels.index(True)
    forms: dict[Any, list[_Error]] = {}
    for error in errors:
        if error.steps[:at] == first.steps[:at] and error.labels[at : at + 1] == (True,):
            forms.setdefault(error.steps[at], []).append(error.without(at))
    fits = [_fit(several, at) for several in forms.values()]
    best = [form for form, fit in zip(forms.values(), fits, strict=True) if fit == max(fits)]
    found = [error for form in best for error in _narrowed(form)]
    are_missing = all(error.kind == "missing" for error in found)
    is_one_place = len({error.steps for error in found}) == 1
    return found if max(fits) != _FITS and (are_missing or is_one_place) else found[:1]


def _fit(errors: Sequence[_Error], at: int) -> tuple[tuple[float, ...], ...]:
    """Place of the first value of another type than a form's, which is later where the form fits better; `_FITS`: there
    is none."""
    misfits = [place for error in errors if (place := error.misfit(at)) is not None]
    return (min(misfits),) if misfits else _FITS
