"""Targets of low-rank adapters: words and peft's names, and the parameters that they stand for.

A parameter of ours may be several modules elsewhere: queries, keys and values, or gate and up. One adapter serves it
whole, so a target must name all of its parts.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from expertmesh.config.adapter import AdapterConfig
from expertmesh.errors import ConfigError, named
from expertmesh.spec.model_spec import ModelSpec, Parameter

_KINDS = {
    "attention": r"attention\.(?!kv_up\.)\w+\.weight",
    "dense": r"(ffn|residual_mlp)\.w_(in|out)",
    "shared": r"shared_experts\.w_(in|out)",
    "experts": r"experts\.w_(in|out)",
    "head": r"output\.weight",
}
"""Ends of names of the parameters that may have an adapter, by kind. kv_up is read per head, not as a map of tokens."""

_SHORT = {one: f"{one}_proj" for one in ("q", "k", "v", "o", "gate", "up", "down")}

KINDS = tuple(_KINDS)
"""Kinds of parameters, each a target."""
USUAL = ("attention", "dense", "shared", "experts")
"""Kinds that a fine-tune adapts unless targets are given."""


def kind_of(name: str) -> str | None:
    """Kind of a parameter by its name; None: it takes no adapter."""
    return next((kind for kind, end in _KINDS.items() if re.search(rf"(^|\.){end}$", name)), None)


def is_adaptable(one: Parameter) -> bool:
    """Whether an adapter of a parameter can be trained."""
    return one.role in ("matrix", "head") and kind_of(one.name) is not None


def adaptable(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Names of transformers' modules of each parameter that may have an adapter, by its name."""
    return {one.name: tuple(name.removesuffix(".weight") for name in one.hub) for one in spec if is_adaptable(one)}


def targeted(parts: Mapping[str, Sequence[str]], targets: Sequence[str], *, option: str = "targets") -> list[str]:
    """Names of the parameters that some targets stand for.

    Args:
        targets: kinds of `KINDS`, or ends of names of parameters or of modules. With `USUAL` itself, kinds that the
            model lacks are passed over.
    """
    found: dict[str, None] = {}
    used: set[str] = set()
    for name, modules in parts.items():
        wholes, ends = list(_wholes(name)), [[own] for own in modules]
        by = {t for t in targets if t == kind_of(name) or _is_end(t, wholes)}
        of_parts = [{t for t in targets if _is_end(_SHORT.get(t, t), one)} for one in ends]
        used |= by.union(*of_parts)
        if by or (of_parts and all(of_parts)):
            found[name] = None
        elif any(of_parts):
            raise ConfigError(option, " ".join(targets), *_half(name, modules, of_parts))
    for target in targets:
        if target not in used and not (tuple(targets) == USUAL and found):
            rule = f"{target} matches nothing that takes an adapter; there are {_choices(parts)}"
            raise ConfigError(option, " ".join(targets), rule, "name some of them")
    return list(found)


def check_targets(config: AdapterConfig, spec: ModelSpec) -> list[str]:
    """Names of the parameters of a model that a run adapts; none, if its weights learn."""
    if not config.rests:
        return []
    names = targeted(adaptable(spec), config.targets, option="adapter.targets")
    if not any(spec.by_name[name].is_expert for name in names):
        for option in ("expert_rank", "shared"):
            if value := getattr(config, option):
                rule = "has no effect without adapters of routed experts"
                fix = f"leave it out, or name experts in {named('adapter.targets')}"
                raise ConfigError(f"adapter.{option}", value, rule, fix)
    check_dropout(config.dropout, names, option="adapter.dropout")
    for name in names:
        one = spec.by_name[name]
        option = "adapter.expert_rank" if one.is_expert and config.expert_rank else "adapter.rank"
        check_rank(rank_of(config, one, spec), one.shape, of=name, is_stack=one.is_expert, option=option)
    return names


def rank_of(config: AdapterConfig, one: Parameter, spec: ModelSpec) -> int:
    """Rank of a run's adapter on a parameter of a model."""
    return config.expert_rank_of(spec.experts_per_token) if one.is_expert else config.rank


def check_dropout(dropout: float, names: Sequence[str], *, option: str = "dropout") -> None:
    """Refuse dropout of the inputs of routed experts' adapters, as peft does."""
    experts = next((name for name in names if kind_of(name) == "experts"), None)
    if dropout and experts is not None:
        rule = f"is of adapters of dense matrices only, and {experts} is of routed experts"
        fix = f"use 0, or leave experts out of {option.replace('dropout', 'targets')}"
        raise ConfigError(option, dropout, rule, fix)


def check_rank(rank: int, shape: Sequence[int], *, of: str, is_stack: bool, option: str = "rank") -> None:
    """Refuse adapters of a higher rank than the matrices have.

    Args:
        shape: (*rows, columns) of the matrix, or (E, *rows, columns) of a stack.
    """
    *rows, columns = shape[is_stack:]
    largest = min(math.prod(rows), columns)
    if rank > largest:
        rule = f"is above {largest}, the largest rank of {of}, {math.prod(rows)} by {columns}"
        raise ConfigError(option, rank, rule, f"use at most {largest}, or other targets")


def _wholes(name: str) -> Iterator[str]:
    """Names of a whole parameter: ours, and transformers' for the matrices of all experts."""
    yield name
    path, _, leaf = name.rpartition(".")
    if leaf == "weight":
        yield path
    elif path.endswith(".experts") or path == "experts":
        fused = {"w_in": "gate_up_proj", "w_out": "down_proj"}[leaf]
        yield f"mlp.experts.{fused}"


def _is_end(target: str, names: Sequence[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _half(name: str, modules: Sequence[str], of_parts: Sequence[set[str]]) -> tuple[str, str]:
    """Rule and fix for targets that name some parts of a parameter."""
    leaves = [own.rpartition(".")[2] for own in modules]
    missing = [leaf for leaf, by in zip(leaves, of_parts, strict=True) if not by]
    rule = f"{name} is {', '.join(leaves)} in one, which one adapter serves"
    return rule, f"name {' and '.join(missing)} too, or {kind_of(name)}"


def _choices(parts: Mapping[str, Sequence[str]]) -> str:
    """Kinds of a model, each with the names of its modules."""
    found: dict[str, dict[str, None]] = {}
    for name, modules in parts.items():
        kind = found.setdefault(str(kind_of(name)), {})
        kind |= dict.fromkeys(own.rpartition(".")[2] for own in (*modules, *_wholes(name)))
    texts = (f"{kind} ({', '.join(n for n in names if n != 'weight')})" for kind, names in found.items())
    return ", ".join(texts) or "none"
