"""A user's own measurements, on which the constants are fitted beside the published ones."""

import difflib
import tomllib
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_type_hints

from expertmesh.config.base import expanded
from expertmesh.config.values import shown
from expertmesh.costs.rank_layout import RankLayout, Workload
from expertmesh.data.encoding import NotTextError, decoded
from expertmesh.errors import ConfigError, text_of
from expertmesh.planner.planned_model import planned_model
from expertmesh.planner.published import (
    OF_LAYOUT,
    OF_WORK,
    RENAMED,
    PublishedMeasurement,
    point_of,
    published_models,
)


def own_points(path: str) -> tuple[PublishedMeasurement, ...]:
    """A user's measurements from a TOML file with sections `points.NAME`, which have the fields of published.toml's
    rows.

    `model` may also be a recipe, a run or a config.json, and `cluster` a file; `settings` may be left out. All rows
    enter the fit.

    Example:
        A file with one row::

            [points.mine]
            model = "qwen3-30b"
            cluster = "h100x8"
            measured = 9000          # tokens per second and GPU
            ep = 8
            mbs = 2
            gbs = 512
    """
    where = f"measured={path}"
    try:
        found = tomllib.loads(decoded(expanded(path).read_bytes()))
    except FileNotFoundError:
        raise ConfigError("measured", path, "does not exist", "check the path") from None
    except (OSError, NotTextError, tomllib.TOMLDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError("measured", path, f"is no TOML file ({reason})", "correct it") from None
    rows = found.get("points")
    if not isinstance(rows, dict) or not all(isinstance(row, dict) for row in rows.values()):
        raise ConfigError("measured", path, "has no sections points.NAME", "write one for each row")
    return tuple(_own_point(where, name, row) for name, row in rows.items())


_NEEDED = ("model", "cluster", "measured", "mbs", "gbs")


def _own_point(where: str, name: str, row: Mapping[str, Any]) -> PublishedMeasurement:
    for field in _NEEDED:
        if field not in row:
            raise ConfigError(f"{where}: points.{name} has no {field}; a row needs {', '.join(_NEEDED)}")
    own = {*_NEEDED, "source", "settings", "unit", "guess", "cause", "seq", "num_experts"}
    allowed = {*own, *RENAMED, *(OF_LAYOUT - set(RENAMED.values())), *OF_WORK}
    for field, value in row.items():
        if field not in allowed:
            near = difflib.get_close_matches(field, allowed, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(allowed))}"
            raise ConfigError(f"{where}: points.{name} has {field}, which no row has; {hint}")
        if rule := _broken_rule(field, value):
            raise ConfigError(f"{where}: points.{name}, {field} {shown(value)}: must be {rule}; correct it")
    usual = {"source": "own", "settings": "automodel", "fit": True}
    try:
        sizes = None if row["model"] in published_models() else planned_model(row["model"]).sizes
        point = point_of(name, {**usual, **row}, sizes)
    except ConfigError as error:
        raise ConfigError(f"{where}: points.{name}: {text_of(error)}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{where}: points.{name} has a field of a wrong type or value ({error}); correct it"
        ) from None
    layout = point.layout
    if layout.accumulation < 1 or layout.stage_ranks % layout.route_degree:
        raise ConfigError(
            f"{where}: points.{name}: its degrees or its batch do not fit {layout.num_ranks} devices; correct them"
        )
    return point


def _broken_rule(field: str, value: Any) -> str:
    """The rule that a field of a row breaks, "" for none."""
    kind = _KINDS.get(RENAMED.get(field, field), object)
    if choices := [one for one in get_args(kind) if isinstance(one, str)]:
        return "" if value in choices else f"one of {', '.join(choices)}"
    if kind in (str, bool):
        return "" if isinstance(value, kind) else _WORDS[kind]
    if kind in (int, int | None):
        return "" if type(value) is int and value > 0 else _WORDS[int]
    if kind is float:
        is_number = type(value) in (int, float)
        return "" if is_number and 0 < value < float("inf") else _WORDS[float]
    return ""


_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number above 0",
    float: "a finite number above 0",
}
_KINDS: dict[str, Any] = {
    **get_type_hints(RankLayout),
    **get_type_hints(Workload),
    **dict.fromkeys(("model", "cluster", "settings", "source", "cause"), str),
    **dict.fromkeys(("gbs", "seq", "num_experts"), int),
    "measured": float,
    "unit": Literal["tokens_per_s", "tflops"],
}
