"""Formats of weights that are served: bytes of a weight with its scales, and the precision of its products, by part of
a model."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeGuard

from expertmesh.config.cluster import Precision
from expertmesh.errors import ConfigError

FormatName = Literal["float32", "bfloat16", "fp8", "int8", "int4", "mxfp4", "nvfp4"]


@dataclass(frozen=True)
class ServedFormat:
    """A format of weights."""

    bytes_each: float  # bytes of a weight, its share of the scales included
    precision: Precision  # precision of products with it


FORMATS: Mapping[FormatName, ServedFormat] = {
    "float32": ServedFormat(4.0, "float32"),
    "bfloat16": ServedFormat(2.0, "bfloat16"),
    "fp8": ServedFormat(1.0 + 4 / 128**2, "float8"),
    "int8": ServedFormat(1.0, "bfloat16"),
    "int4": ServedFormat(0.5 + 2 / 64, "bfloat16"),
    "mxfp4": ServedFormat(0.5 + 1 / 32, "bfloat16"),
    "nvfp4": ServedFormat(0.5 + 1 / 16, "float8"),
}
"""Formats by name: FP8 with a scale for 128 x 128 weights, int8 by row, int4 in groups of 64, MXFP4 in blocks of 32,
NVFP4 of 16. Four-bit weights are widened for their products, NVFP4's to FP8."""


def _is_format(name: str) -> TypeGuard[FormatName]:
    return name in FORMATS


@dataclass(frozen=True)
class Weights:
    """Formats of the parts of a model."""

    experts: FormatName = "bfloat16"  # of routed experts
    attention: FormatName = "bfloat16"  # of attention's matrices
    dense: FormatName = "bfloat16"  # of shared experts and dense layers
    embedding: FormatName = "bfloat16"  # of embedding and output

    @staticmethod
    def all(name: FormatName) -> "Weights":
        """All parts in one format; of a narrow one embedding and output stay in BF16, as files have them."""
        outside = name if name in ("float32", "bfloat16") else "bfloat16"
        return Weights(name, name, name, outside)

    @staticmethod
    def of(text: str, *, usual: "Weights | None" = None) -> "Weights":
        """Formats from text: one format, or part=format, several with commas.

        Args:
            text: for example "fp8" or "experts=mxfp4,attention=bfloat16".
            usual: formats of the parts that it does not name; None: BF16.

        Example:
            >>> from expertmesh.costs.weight_formats import Weights
            >>> Weights.of("experts=mxfp4").attention
            'bfloat16'
        """
        found = usual or Weights()
        for word in text.split(","):
            part, equals, name = word.strip().rpartition("=")
            if not _is_format(name):
                raise ConfigError("weights", text, f"must have formats of {', '.join(FORMATS)}", "name one")
            if not equals:
                found = Weights.all(name)
            elif part not in PARTS:
                raise ConfigError("weights", text, f"must name parts of {', '.join(PARTS)}", "name one")
            else:
                found = replace(found, **{part: name})
        return found

    def bytes_of(self, part: str) -> float:
        """Bytes of a weight of a part."""
        return FORMATS[getattr(self, part)].bytes_each

    def words(self) -> str:
        """The formats in words."""
        each = {part: getattr(self, part) for part in PARTS}
        kinds = dict.fromkeys(each.values())
        if len(kinds) == 1:
            return f"weights in {next(iter(kinds))}"
        parts = ", ".join(f"{part} in {name}" for part, name in each.items())
        return f"weights: {parts}"


PARTS = tuple(field.name for field in fields(Weights))
"""Names of the parts."""
_OF_FILES: Mapping[str, FormatName] = {
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "modelopt": "fp8",
    "mxfp4": "mxfp4",
    "nvfp4": "nvfp4",
    "gptq": "int4",
    "awq": "int4",
    "auto-round": "int4",
    "bitsandbytes": "int4",
}


def weights_of_files(given: Any) -> Weights | None:
    """Formats that the `quantization_config` of a config.json says; None: it says nothing that is known."""
    if not isinstance(given, Mapping):
        return None
    text = str(given).lower()
    name = _OF_FILES.get(str(given.get("quant_method")))
    if name == "int4" and (given.get("bits") == 8 or given.get("load_in_8bit")):
        name = "int8"
    if name == "fp8" and ("nvfp4" in text or "mxfp4" in text):
        name = "nvfp4" if "nvfp4" in text else "mxfp4"
    if given.get("quant_method") == "compressed-tensors":
        is_float, four = "'type': 'float'" in text, "'num_bits': 4" in text
        name = ("nvfp4" if four else "fp8") if is_float else ("int4" if four else "int8")
        name = name if four or "'num_bits': 8" in text else None
    if name is None:
        return None
    return Weights(experts=name) if name == "mxfp4" else Weights.all(name)
