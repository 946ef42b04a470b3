"""Folders of low-rank adapters as peft saves them: their options, and their factors as those of our parameters.

Names are those of the modules of transformers, of a hub model's files, or of our own model inside `ExpertMeshForCausalLM`.
Queries, keys and values are one matrix of ours, and a gate and what it multiplies are, too: adapters of both are one of ours then,
whose rank is the sum of theirs, and whose second factor has zeros where rows are not theirs.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertmesh.checkpoints.hub.layout import pieces, spellings
from expertmesh.config.base import expanded, parse_json
from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.layout.spec import Parameter
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
IN_HUB = {"w_in": "gate_up_proj", "w_out": "down_proj"}
"""Parameters of experts that peft targets, by ours."""
_PREFIX = "base_model.model."
_OWN_PREFIX = "gpt."
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")

_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Options of peft with the values under which an adapter is W + s B A; other first factors change W, too."""


@dataclass(frozen=True)
class AdapterFiles:
    """A folder of peft's, read.

    Attributes:
        folder: where it lies.
        values: of adapter_config.json.
        tensors: by their names in the files.
        metadata: of the file of tensors.
    """

    folder: Path
    values: Mapping[str, Any]
    tensors: dict[str, Tensor]
    metadata: Mapping[str, str]

    def rank_of(self, module: str) -> int:
        """r of the adapter on a module, or on a parameter of one."""
        return self._by_pattern("rank_pattern", module, self.values["r"])

    def scaling_of(self, module: str) -> float:
        """s of the same."""
        rank = self.rank_of(module)
        alpha = self._by_pattern("alpha_pattern", module, self.values["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank)

    def _by_pattern(self, option: str, module: str, usual: Any) -> Any:
        """As peft reads it: the first pattern that a name ends with. Its numbers have been checked."""
        given = self.values.get(option) or {}
        found = (v for key, v in given.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, usual)

    def target_parameters(self) -> list[str]:
        """Parameters of experts that have adapters, as ours are called.

        Raises:
            ConfigError: one is of no experts.
        """
        return [_ours(theirs) for theirs in self.values.get("target_parameters") or []]


def read_adapter_files(folder: str | Path) -> AdapterFiles:
    """Read a folder of peft's `save_pretrained`, or of `expertmesh.integrations.peft.save_adapters`.

    Raises:
        ConfigError: it holds no adapters.
        CheckpointError: their tensors are missing or unreadable.
    """
    folder = expanded(folder)
    try:
        values = parse_json((folder / CONFIG).read_bytes())
        kind, rank, alpha = (values[name] for name in ("peft_type", "r", "lora_alpha"))
    except (OSError, ValueError, KeyError, TypeError):
        raise ConfigError(
            f"{folder}: has no readable {CONFIG}; give a folder of peft's save_pretrained or of save_adapters"
        ) from None
    if kind != "LORA":
        raise ConfigError(f"{folder}: peft_type={kind!r}: only LORA is known; train such adapters")
    patterns = [values.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(one, dict) and all(map(_is_pattern, one)) for one in patterns):
        raise ConfigError(
            f"{folder}: rank_pattern or alpha_pattern in {CONFIG} has no patterns and numbers; save the adapters again"
        )
    for name, given, kind in (
        ("r", [rank, *patterns[0].values()], int),
        ("lora_alpha", [alpha, *patterns[1].values()], int | float),
    ):
        for value in given:
            if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
                raise ConfigError(
                    f"{folder}: {name}={value!r} in {CONFIG}: must be a number above 0; save the adapters again"
                )
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError):
        raise CheckpointError(
            f"{folder / WEIGHTS}: is missing or unreadable; restore it, or save the adapters again"
        ) from None
    return AdapterFiles(folder, values, tensors, metadata)


def _is_pattern(text: str) -> bool:
    try:
        re.compile(text)
    except re.error:
        return False
    return True


def _ours(theirs: str) -> str:
    for ours, name in IN_HUB.items():
        if theirs == name or theirs.endswith(f"experts.{name}"):
            return ours
    raise ConfigError(
        f"target_parameters={theirs}: is on no experts; adapters of expertmesh are on {' and '.join(IN_HUB.values())}"
    )


class Factors(NamedTuple):
    """The adapter of one of our parameters, (E, ..., K) or (..., K) with all rows in one dimension.

    Attributes:
        a_erK: (e, r, K) first factors; e is E, or 1 where there are no experts.
        b_eNr: (e, N, r) second factors, times s.
    """

    a_erK: Tensor
    b_eNr: Tensor


class _Place(NamedTuple):
    """Where rows of a module of theirs lie in a parameter of ours.

    Attributes:
        parameter: of ours.
        part: which of those modules that are one parameter of ours.
        expert: whose rows they are.
        ours: rows there, counted over all dimensions but those of experts and columns.
        theirs: rows of the module.
        num_rows: of the module.
        num_columns: of both.
        num_experts: whose factors lie in one tensor of theirs.
    """

    parameter: str
    part: int
    expert: int
    ours: slice
    theirs: slice
    num_rows: int
    num_columns: int
    num_experts: int = 1


@dataclass
class _Parts:
    """What is known of the adapter of one parameter."""

    found: dict[int, list[tuple[_Place, Tensor, Tensor]]] = field(default_factory=dict)

    def factors(self, one: Parameter, *, multiple: int) -> Factors:
        """The factors, their rank filled up with zeros to a multiple of a number."""
        e = one.shape[0] if one.is_expert else 1
        rows = math.prod(one.shape[one.is_expert : -1])
        ranks = {part: len(each[0][1]) for part, each in sorted(self.found.items())}
        r = -(-sum(ranks.values()) // multiple) * multiple
        like = next(iter(self.found.values()))[0][1]
        a_erK, b_eNr = like.new_zeros(e, r, one.shape[-1]), like.new_zeros(e, rows, r)
        first = 0
        for part, rank in ranks.items():
            at = slice(first, first + rank)
            for place, a_rK, b_Nr in self.found[part]:
                a_erK[place.expert, at] = a_rK
                b_eNr[place.expert, place.ours, at] = b_Nr[place.theirs]
            first += rank
        return Factors(a_erK, b_eNr)


def read_factors(
    files: AdapterFiles, config: ModelConfig, *, multiple: int = 1
) -> dict[str, Factors]:
    """The factors of all adapters of a folder, by the names of our parameters.

    Args:
        files: the folder.
        config: of the model that they are for.
        multiple: ranks are filled up with zeros to a multiple of it.

    Raises:
        ConfigError: an option of peft's that makes its adapters others than W + s B A, or an adapter on what takes none; named.
        CheckpointError: a tensor is missing, extra, of another shape, or not finite; named.
    """
    folder, places, spec = files.folder, _places(config), gpt_spec(config)
    files.target_parameters()  # others than of experts are refused
    for name, allowed in _LEFT_OUT.items():
        value = files.values.get(name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{folder}: {name}={value!r}: is not served, only {allowed[0]!r}; merge the adapter into its model with peft, and"
                " give that"
            )
    parts: dict[str, _Parts] = {}
    for module, (a, b) in _pairs(files).items():
        theirs = _by_target(module, files)
        if theirs not in places:
            raise _no_place(folder, module, theirs, config)
        rank, first = files.rank_of(theirs), places[theirs][0]
        count = first.num_experts
        wanted = {"A": (rank * count, first.num_columns), "B": (first.num_rows, rank * count)}
        for factor, tensor in (("A", a), ("B", b)):
            if tuple(tensor.shape) != wanted[factor]:
                raise CheckpointError(
                    f"{folder}: {module}.lora_{factor}.weight has shape {tuple(tensor.shape)} and must have {wanted[factor]} by r={rank}"
                    f" in {CONFIG} and this model; use the model that it is of"
                )
        wide = torch.promote_types(b.dtype, torch.float32)
        b = (b.to(wide) * files.scaling_of(theirs)).to(b.dtype)
        for place in places[theirs]:
            at = place.expert if count > 1 else 0
            own = a.view(count, rank, -1)[at], b.view(-1, rank, count)[:, :, at]
            known = parts.setdefault(place.parameter, _Parts()).found.setdefault(place.part, [])
            known.append((place, *own))
    if not parts:
        raise CheckpointError(f"{folder / WEIGHTS}: has no adapter; save the adapters again")
    return {
        name: found.factors(spec.by_name[name], multiple=multiple) for name, found in parts.items()
    }


def _pairs(files: AdapterFiles) -> dict[str, tuple[Tensor, Tensor]]:
    """Both factors of each module, by its name."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in files.tensors.items():
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(
                f"{files.folder}: has a tensor {key} that is no factor of an adapter; save the adapters again"
            )
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(
                f"{files.folder}: {key} is not finite or no real numbers; save the adapters again"
            )
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    for module, both in found.items():
        for factor in "AB":
            if factor not in both:
                raise CheckpointError(
                    f"{files.folder}: has no tensor {_PREFIX}{module}.lora_{factor}.weight; save the adapters again"
                )
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _by_target(module: str, files: AdapterFiles) -> str:
    """A module's name with that of the parameter, where peft has the adapter on one: of two, down_proj's is the outer one."""
    path = module.removesuffix(".base_layer")
    if not path.endswith(".experts"):
        return module
    # two names may stand for one parameter
    targets = sorted(set(files.target_parameters()), reverse=True)
    if not targets:
        raise CheckpointError(
            f"{files.folder}: {module} has adapters, and target_parameters in {CONFIG} names none; save the adapters again"
        )
    ours = targets[-1] if module != path or len(targets) == 1 else targets[0]
    return f"{path}.{IN_HUB[ours]}"


@lru_cache(maxsize=4)
def _places(config: ModelConfig) -> Mapping[str, list[_Place]]:
    """Where the rows of each module that may have an adapter lie in our parameters, by all its names."""
    spec = gpt_spec(config)
    found: dict[str, list[_Place]] = {}
    for one in spec:
        if not can_have_adapter(one):
            continue
        if one.name.endswith(".weight"):
            rows, columns = one.shape
            own = _Place(one.name, 0, 0, slice(0, rows), slice(0, rows), rows, columns)
            found[_OWN_PREFIX + one.name.removesuffix(".weight")] = [own]
    for piece in pieces(config, ""):
        known = spec.by_name.get(piece.ours)
        if known is None or not can_have_adapter(known):
            continue
        one = known
        place = _placed(one, piece.ours_at, piece.theirs_at[0], piece.theirs_shape[0])
        part = [name.format(expert=place.expert) for name in one.hub].index(piece.theirs)
        for name in spellings(piece.theirs.removesuffix(".weight")):
            found.setdefault(name, []).append(place._replace(part=part))
    for one in spec:
        if one.is_expert and can_have_adapter(one):
            for place in _fused(one, config):
                path, _, ours = one.name.rpartition(".")
                name = "model." + path.replace(".moe.", ".mlp.") + f".{IN_HUB[ours]}"
                found.setdefault(name, []).append(place)
    return found


def can_have_adapter(one: Parameter) -> bool:
    """Whether a parameter is a matrix that each token passes by itself, and reads in no other form."""
    is_read_otherwise = one.name.endswith("attention.kv_up.weight")
    return one.role in ("matrix", "gate") and one.part != "router" and not is_read_otherwise


def _placed(one: Parameter, at: tuple[slice, ...], theirs: slice, num_rows: int) -> _Place:
    """Where a part lies among the rows of all dimensions but the last."""
    expert = at[0].start if one.is_expert else 0
    *lead, _ = at[one.is_expert :]
    sizes = one.shape[one.is_expert : -1]
    first = 0
    for place, size in zip(lead, sizes, strict=True):
        first = first * size + place.start
    count = math.prod(place.stop - place.start for place in lead)
    return _Place(one.name, 0, expert, slice(first, first + count), theirs, num_rows, one.shape[-1])


def _fused(one: Parameter, config: ModelConfig) -> Iterator[_Place]:
    """The rows of all experts' tensor of transformers: gates before ups, or taking turns."""
    E, *inner, K = one.shape
    rows = math.prod(inner)
    takes_turns = config.activation == "clamped_swiglu" and one.name.endswith("w_in")
    for expert in range(E):
        if not takes_turns:
            whole = slice(0, rows)
            yield _Place(one.name, 0, expert, whole, whole, rows, K, E)
            continue
        G, F = inner
        for g in range(G):
            ours, theirs = slice(g * F, g * F + F), slice(g, rows, G)
            yield _Place(one.name, 0, expert, ours, theirs, rows, K, E)


def _no_place(
    folder: Path, module: str, theirs: str, config: ModelConfig
) -> ConfigError | CheckpointError:
    """What to say of an adapter that there is no place for: the module takes none, or the model has no such module."""
    names = {
        name.replace("{expert}", r"\d+").removesuffix(".weight")
        for one in gpt_spec(config)
        for own in one.hub
        for name in spellings(own)
    }
    if any(re.fullmatch(name.replace(".", r"\."), theirs) for name in names):
        return ConfigError(
            f"{folder}: has an adapter on {module}, which takes none here: it is on matrices of attention (but kv_b_proj), of dense"
            " layers, and of experts; train it on those, or merge it into its model with peft"
        )
    return CheckpointError(
        f"{folder}: has an adapter on {module}, which this model has not; use the model that it is of"
    )
