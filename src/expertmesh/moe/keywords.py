"""The keywords of `MoELayer` that are options: the fields of `LayerOptions`, which says their types, defaults and rules."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from expertmesh.config.moe_rules import LayerOptions

_OF_THE_LAYER = ("router", "own_router", "own_experts")
"""Fields that the layer fills in from its parts."""

KEYWORDS = {
    name: field for name, field in LayerOptions.model_fields.items() if name not in _OF_THE_LAYER
}
"""Options that are keywords of the layer, by name."""

_REQUIRED = ("dim", "hidden_dim", "num_experts", "top_k")
"""A configuration has defaults for some of these; a layer has none."""


def check_keywords(given: Mapping[str, Any], *, known: Mapping[str, Any]) -> None:
    """Refuse keywords as Python does.

    Raises:
        TypeError: one is unknown or missing.
    """
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"MoELayer() got an unexpected keyword argument {name!r}{hint}")
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise TypeError(f"MoELayer() needs the keyword arguments {', '.join(missing)}")


def signature_with(function: Callable[..., Any], known: Mapping[str, Any]) -> inspect.Signature:
    """The signature of a function that takes options, with each of them in the place of `**options`."""
    plain = inspect.signature(function)
    own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if name in _REQUIRED else field.default,
            annotation=field.annotation,
        )
        for name, field in known.items()
    ]
    return plain.replace(parameters=[own[0], *options, *own[1:]])
