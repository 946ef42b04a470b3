"""Keywords of `MoELayer` that are options: fields of `LayerOptions`, which has their types, defaults and rules."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from expertmesh.config.moe_rules import LayerOptions

_OF_THE_LAYER = ("router", "own_router", "own_experts")
"""Fields that the layer sets from its router and experts."""

KEYWORDS = {name: field for name, field in LayerOptions.model_fields.items() if name not in _OF_THE_LAYER}
"""Options that are keywords of the layer, by name."""

_REQUIRED = ("dim", "hidden_dim", "num_experts", "top_k")
"""Required keywords; a configuration has defaults for some of them, a layer has none."""


def check_keywords(given: Mapping[str, Any], *, known: Mapping[str, Any]) -> None:
    """Raise TypeError for unknown or missing keywords, as Python does."""
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise TypeError(f"MoELayer() got an unexpected keyword argument {name!r}{hint}")
    missing = [name for name in _REQUIRED if name not in given]
    if missing:
        raise TypeError(f"MoELayer() needs the keyword arguments {', '.join(missing)}")


def signature_with(function: Callable[..., Any], known: Mapping[str, Any]) -> inspect.Signature:
    """Signature of a function that takes `**options`, with each option as a keyword of its own."""
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
