"""Lines on what a config.json says of its files and no plan counts, beside what is guessed."""

from collections.abc import Callable, Mapping
from typing import Any

_Values = Mapping[str, Any]


def _format(v: _Values) -> str:
    given = v.get("quantization_config")
    if not given:
        return ""
    method = given.get("quant_method") if isinstance(given, Mapping) else None
    return f"{method or 'given'}: weights count as BF16, of which the files may have fewer bytes"


def _wide(v: _Values) -> str:
    found = [name for name in ("dtype", "torch_dtype") if v.get(name) in ("float32", "float64")]
    return f"{v[found[0]]}: weights may take more bytes than are counted" if found else ""


def _more_layers(v: _Values) -> str:
    count = v.get("num_nextn_predict_layers")
    return f"{count}: these layers are left out" if count else ""


def _windows(v: _Values) -> str:
    if not (v.get("layer_types") and v.get("sliding_window")):
        return ""
    return "not read: of a mixture every second layer has the window, of another model all have"


_PARTS = ("vision_config", "audio_config")


def _encoders(_: _Values) -> str:
    return "is left out: the decoder alone is counted"


_ROWS: dict[str, Callable[[_Values], str]] = {
    "quantization_config": _format,
    "dtype": _wide,
    "num_nextn_predict_layers": _more_layers,
    "layer_types": _windows,
    **dict.fromkeys(_PARTS, _encoders),
}


def unread(values: _Values) -> tuple[str, ...]:
    """Lines on what a config.json of the hub, or of a run, says and the planner does not count."""
    return tuple(
        f"config.json's {name} {words}"
        for name, says in _ROWS.items()
        if (name not in _PARTS or values.get(name)) and (words := says(values))
    )
