"""Folders of low-rank adapters in peft's format: their options, and their factors mapped to our parameters.

Adapters are named after modules of transformers, tensors of a hub model's files, or modules of our model inside
`ExpertMeshForCausalLM`. Our GPT has one matrix for queries, keys and values, and one for gate and up. Adapters of
several such modules become one adapter, whose rank is the sum of their ranks, and whose second factor has zeros outside
each module's rows.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from expertmesh.checkpoints.grown_rows import TABLES, TrainedTokens
from expertmesh.checkpoints.hub.layout import pieces, spellings
from expertmesh.checkpoints.safetensors import READABLE, read_header
from expertmesh.config.base import expanded, parse_json
from expertmesh.config.input_folder import check_only_files
from expertmesh.config.values import REAL, WHOLE, Number, quoted
from expertmesh.errors import CheckpointError, ConfigError, command
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.model_spec import Parameter

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
IN_HUB = {"w_in": "gate_up_proj", "w_out": "down_proj"}
"""Names that peft targets for experts' parameters, by our names."""
_PREFIX = "base_model.model."
_OWN_PREFIX = "gpt."
ROWS, INDICES = ".token_adapter.trainable_tokens_delta", "trainable_token_indices"
"""End of the names of rows of tokens, and the option with their ids by module; a list is of the embedding."""
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<factor>[AB])(\.default)?\.weight")

_LEFT_OUT: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
    "modules_to_save": (None, []),
    INDICES: (None, [], {}),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
}
"""Options of peft and their values with which an adapter computes W + s B A; other `init_lora_weights` change W,
too."""


@dataclass(frozen=True)
class AdapterFiles:
    """Contents of a folder of peft."""

    folder: Path
    values: Mapping[str, Any]  # the values of adapter_config.json
    tensors: dict[str, Tensor]  # the factors, by name in the file
    metadata: Mapping[str, str]  # metadata of the file of tensors

    def rank_of(self, module: str) -> int:
        """Rank r of the adapter on a module or a module's parameter."""
        result: int = self._by_pattern("rank_pattern", module, self.values["r"])
        return result

    def scaling_of(self, module: str) -> float:
        """Scaling s of the adapter on a module or a module's parameter."""
        rank = self.rank_of(module)
        alpha = self._by_pattern("alpha_pattern", module, self.values["lora_alpha"])
        return float(alpha / math.sqrt(rank) if self.values.get("use_rslora") else alpha / rank)

    def _by_pattern(self, option: str, module: str, usual: Any) -> Any:
        """Value of the first pattern that matches the end of a module's name, as in peft; `usual` without a match."""
        given = self.values.get(option) or {}
        found = (v for key, v in given.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(found, usual)

    def target_parameters(self) -> list[str]:
        """Parameters of experts that have adapters, by our names."""
        given = self.values.get("target_parameters") or []
        return [_ours(theirs) for theirs in given if not theirs.endswith("_proj.weight")]


def read_adapter_files(folder: str | Path) -> AdapterFiles:
    """Read a folder of peft's `save_pretrained`, or of `expertmesh.integrations.peft.save_adapters`."""
    folder = expanded(folder)
    check_only_files(folder, what=str(folder), depth=1)
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
        ("r", [rank, *patterns[0].values()], WHOLE),
        ("lora_alpha", [alpha, *patterns[1].values()], REAL),
    ):
        for value in given:
            above_0 = Number(0, types=kind, is_open=True)
            if not above_0.holds(value):
                raise ConfigError(f"{folder}: {name}={value!r} in {CONFIG}: {above_0.rule}; save the adapters again")
    entries, metadata = read_header(folder / WEIGHTS, fix="restore it, or save the adapters again")
    for name, entry in entries.items():
        if entry.dtype not in READABLE:
            raise CheckpointError(
                f"{folder}: {name} is of type {str(entry.dtype).removeprefix('torch.')}; save the adapters again in "
                "float32 or bfloat16"
            )
    tensors = {name: entry.mapped() for name, entry in entries.items()}
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
    """Factors of the adapter of one of our parameters, (E, ..., K) or (..., K), with all rows in one dimension N."""

    a_erK: Tensor  # (e, r, K) first factors; e is E, or 1 where there are no experts
    b_eNr: Tensor  # (e, N, r) second factors
    scaling: float  # s; 1 where several adapters with a scaling of their own are joined, in whose second factors it is

    def scaled(self) -> Tensor:
        """Second factors times s."""
        return _times(self.b_eNr, self.scaling)


def _times(b: Tensor, scaling: float) -> Tensor:
    wide = torch.promote_types(b.dtype, torch.float32)
    return b if scaling == 1.0 else (b.to(wide) * scaling).to(b.dtype)


class ModuleRows(NamedTuple):
    """Mapping of rows of a peft module to rows of a parameter of ours."""

    parameter: str  # name of our parameter
    part: int  # index of the module among the modules that are one parameter of ours
    expert: int
    ours: slice  # rows in our parameter, counted over all dimensions but experts and columns
    module_rows: slice  # the same rows in the module
    num_rows: int
    num_columns: int  # columns of module and parameter
    num_experts: int = 1  # number of experts whose factors are one tensor in the file


@dataclass
class _Parts:
    """Factors found for one parameter, by part."""

    found: dict[int, list[tuple[ModuleRows, Tensor, Tensor, float]]] = field(default_factory=dict)

    def factors(self, one: Parameter, *, multiple: int) -> Factors:
        """The joined factors, their rank padded with zeros to a multiple of `multiple`."""
        e = one.shape[0] if one.is_expert else 1
        rows = math.prod(one.shape[one.is_expert : -1])
        ranks = {part: len(each[0][1]) for part, each in sorted(self.found.items())}
        parts = [found for each in self.found.values() for found in each]
        scalings = {scaling for *_, scaling in parts}
        is_one = len(self.found) == len(one.hub) and len(scalings) == 1 and _share_first(parts)
        r = -(-(max(ranks.values()) if is_one else sum(ranks.values())) // multiple) * multiple
        like = parts[0][1]
        a_erK, b_eNr = like.new_zeros(e, r, one.shape[-1]), like.new_zeros(e, rows, r)
        first = 0
        for part, rank in ranks.items():
            at = slice(first, first + rank)
            for place, a_rK, b_Nr, scaling in self.found[part]:
                own = b_Nr if len(scalings) == 1 else _times(b_Nr, scaling)
                a_erK[place.expert, at] = a_rK
                b_eNr[place.expert, place.ours, at] = own[place.module_rows]
            first += 0 if is_one else rank
        return Factors(a_erK, b_eNr, scalings.pop() if len(scalings) == 1 else 1.0)


def _share_first(parts: Iterable[tuple[ModuleRows, Tensor, Tensor, float]]) -> bool:
    """Whether the parts of a parameter have equal first factors, as one adapter of ours is written."""
    known: dict[int, Tensor] = {}
    return all(
        known.setdefault(place.expert, a).shape == a.shape and torch.equal(known[place.expert], a)
        for place, a, *_ in parts
    )


def read_factors(files: AdapterFiles, config: ModelConfig, *, multiple: int = 1) -> dict[str, Factors]:
    """The factors of all adapters of a folder, by the names of our parameters."""
    folder, places, spec = files.folder, places_of(config), gpt_spec(config)
    files.target_parameters()  # refuses targets that are not experts
    for name, allowed in _LEFT_OUT.items():
        value = files.values.get(name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{folder}: {name}={quoted(value)}: is not served, only {allowed[0]!r}; merge the adapter into its "
                f"model with peft, or the run that it is of with {command('convert')}, and give that"
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
                    f"{folder}: {module}.lora_{factor}.weight has shape {tuple(tensor.shape)} and must have "
                    f"{wanted[factor]} by r={rank}"
                    f" in {CONFIG} and this model; use the model that it is of"
                )
        scaling = files.scaling_of(theirs)
        for place in places[theirs]:
            at = place.expert if count > 1 else 0
            own = a.view(count, rank, -1)[at], b.view(-1, rank, count)[:, :, at]
            known = parts.setdefault(place.parameter, _Parts()).found.setdefault(place.part, [])
            known.append((place, *own, scaling))
    if not parts:
        raise CheckpointError(f"{folder / WEIGHTS}: has no adapter; save the adapters again")
    return {name: found.factors(spec.by_name[name], multiple=multiple) for name, found in parts.items()}


def without_token_rows(files: AdapterFiles, config: ModelConfig) -> tuple[AdapterFiles, TrainedTokens]:
    """The folder without its rows of tokens, for `read_factors`, and these rows."""
    given, tensors = files.values.get(INDICES) or {}, dict(files.tensors)
    by_module = given if isinstance(given, dict) else {"embed_tokens": given}
    spec, rows, found = gpt_spec(config), dict[str, Tensor](), list[list[int]]()
    tables = [spec.by_name[table] for table in TABLES if table in spec.by_name]
    places = {name.removesuffix(".weight"): one for one in tables for name in spellings(one.hub[0])}
    for module, one in places.items():
        own = tensors.pop(f"{_PREFIX}{module}{ROWS}", None)
        if own is None:
            continue
        ids: Any = next((ids for name, ids in by_module.items() if f".{module}".endswith(f".{name}")), None)
        is_known = isinstance(ids, list) and all(isinstance(i, int) for i in ids)
        if not is_known or own.shape != (len(ids), one.shape[-1]) or not own.isfinite().all():
            rule = f"{module}{ROWS} has not one finite row of {one.shape[-1]} for each of {INDICES} in {CONFIG}"
            raise CheckpointError(f"{files.folder}: {rule}; save the adapters again")
        rows[one.name] = own[sorted(range(len(ids)), key=ids.__getitem__)]
        found.append(sorted(ids))
    if any(ids != found[0] for ids in found):
        raise ConfigError(f"{files.folder}: {INDICES} has other tokens for each matrix; train the same for both")
    if not found:
        return files, TrainedTokens()
    return replace(files, values={**files.values, INDICES: None}, tensors=tensors), TrainedTokens(found[0], rows)


def _pairs(files: AdapterFiles) -> dict[str, tuple[Tensor, Tensor]]:
    """Factors (A, B) of each module, by the module's name."""
    found: dict[str, dict[str, Tensor]] = {}
    for key, tensor in files.tensors.items():
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            raise CheckpointError(
                f"{files.folder}: has a tensor {key} that is no factor of an adapter; save the adapters again"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{files.folder}: {key} is not finite; save the adapters again")
        of_module = found.setdefault(match["module"], {})
        if match["factor"] in of_module:
            raise CheckpointError(
                f"{files.folder}: has two tensors for lora_{match['factor']} of {match['module']}, {key} and another; "
                "save the adapters again"
            )
        of_module[match["factor"]] = tensor
    for module, both in found.items():
        for factor in "AB":
            if factor not in both:
                raise CheckpointError(
                    f"{files.folder}: has no tensor {_PREFIX}{module}.lora_{factor}.weight; save the adapters again"
                )
    return {module: (both["A"], both["B"]) for module, both in found.items()}


def _by_target(module: str, files: AdapterFiles) -> str:
    """The name of an adapter's module, with the parameter's name where the adapter is on one; of two, the outer is
    down_proj's."""
    path = module.removesuffix(".base_layer")
    if not path.endswith(".experts"):
        return module
    # two names may stand for one parameter
    targets = sorted(set(files.target_parameters()), reverse=True)
    if not targets:
        raise CheckpointError(
            f"{files.folder}: {module} has adapters, and target_parameters in {CONFIG} names none; save the adapters "
            "again"
        )
    ours = targets[-1] if module != path or len(targets) == 1 else targets[0]
    return f"{path}.{IN_HUB[ours]}"


@lru_cache(maxsize=4)
def places_of(config: ModelConfig) -> Mapping[str, list[ModuleRows]]:
    """Places in our parameters of each module that may have an adapter, by all names of the module."""
    spec = gpt_spec(config)
    found: dict[str, list[ModuleRows]] = {}
    for one in spec:
        if not can_have_adapter(one):
            continue
        if one.name.endswith(".weight"):
            rows, columns = one.shape
            own = ModuleRows(one.name, 0, 0, slice(0, rows), slice(0, rows), rows, columns)
            found[_OWN_PREFIX + one.name.removesuffix(".weight")] = [own]
    for piece in pieces(config, ""):
        known = spec.by_name.get(piece.ours)
        if known is None or not can_have_adapter(known):
            continue
        one = known
        place = _placed(one, piece.ours_at, piece.hub_at[0], piece.hub_shape[0])
        part = [name.format(expert=place.expert) for name in one.hub].index(piece.hub_name)
        for name in spellings(piece.hub_name.removesuffix(".weight")):
            found.setdefault(name, []).append(place._replace(part=part))
    for one in spec:
        if one.is_expert and can_have_adapter(one):
            for place in _fused(one, config):
                path, _, ours = one.name.rpartition(".")
                name = "model." + path.replace(".moe.", ".mlp.") + f".{IN_HUB[ours]}"
                found.setdefault(name, []).append(place)
    return found


def can_have_adapter(one: Parameter) -> bool:
    """Whether a parameter may have an adapter: a matrix applied to each token by itself, and used in no other form."""
    is_read_otherwise = one.name.endswith("attention.kv_up.weight")
    return one.role in ("matrix", "gate", "head") and one.part != "router" and not is_read_otherwise


def _placed(one: Parameter, at: tuple[slice, ...], theirs: slice, num_rows: int) -> ModuleRows:
    """`ModuleRows` of a part, its rows counted over all dimensions but the last."""
    expert = at[0].start if one.is_expert else 0
    *lead, _ = at[one.is_expert :]
    sizes = one.shape[one.is_expert : -1]
    first = 0
    for place, size in zip(lead, sizes, strict=True):
        first = first * size + place.start
    count = math.prod(place.stop - place.start for place in lead)
    return ModuleRows(one.name, 0, expert, slice(first, first + count), theirs, num_rows, one.shape[-1])


def _fused(one: Parameter, config: ModelConfig) -> Iterator[ModuleRows]:
    """Places of transformers' tensor of all experts: gate rows before up rows, or alternating."""
    E, *inner, K = one.shape
    rows = math.prod(inner)
    takes_turns = config.activation == "clamped_swiglu" and one.name.endswith("w_in")
    for expert in range(E):
        if not takes_turns:
            whole = slice(0, rows)
            yield ModuleRows(one.name, 0, expert, whole, whole, rows, K, E)
            continue
        G, F = inner
        for g in range(G):
            ours, theirs = slice(g * F, g * F + F), slice(g, rows, G)
            yield ModuleRows(one.name, 0, expert, ours, theirs, rows, K, E)


def _no_place(folder: Path, module: str, theirs: str, config: ModelConfig) -> ConfigError | CheckpointError:
    """The error for an adapter without a place: its module takes none, or the model has no such module."""
    names = {
        name.replace("{expert}", r"\d+").removesuffix(".weight")
        for one in gpt_spec(config)
        for own in one.hub
        for name in spellings(own)
    }
    if any(re.fullmatch(name.replace(".", r"\."), theirs) for name in names):
        return ConfigError(
            f"{folder}: has an adapter on {module}, which takes none here: it is on matrices of attention (but "
            "kv_b_proj), of dense"
            " layers, and of experts; train it on those, or merge it into its model with peft"
        )
    return CheckpointError(
        f"{folder}: has an adapter on {module}, which this model has not; use the model that it is of"
    )
