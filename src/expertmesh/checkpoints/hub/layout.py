"""Mapping of the tensors of a hub checkpoint to the tensors of our GPT, part by part."""

from collections.abc import Iterator
from itertools import product

from expertmesh.checkpoints.box import whole_box
from expertmesh.checkpoints.hub.family import Piece
from expertmesh.checkpoints.hub.find_family import FAMILIES, find_hub_family
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.spec import gpt_spec
from expertmesh.spec.model_spec import Parameter


def pieces(config: ModelConfig, model_type: str, *, one_by_one: bool = False) -> Iterator[Piece]:
    """Pieces that cover all tensors of the hub's files and of our GPT once; pieces of one tensor of ours are
    consecutive.

    Args:
        model_type: architecture of the hub; empty: tensors have the names of the spec's `hub`.
        one_by_one: whether each expert has tensors of its own even if the family's files have one for all, as in
            quantised folders.
    """
    family = find_hub_family(model_type) if model_type else None
    theirs_of = family.hub_name if family else str
    for one in gpt_spec(config):
        names = tuple(map(theirs_of, one.hub))
        if not names:
            continue
        if one.is_expert and family and family.experts and not one_by_one:
            yield from family.experts(one, names)
        else:
            yield from _pieces_of(one, names, config)
        if one.role == "router" and config.moe.bias_update_rate:
            inside, E = one.name.removesuffix("router.proj.weight"), one.shape[0]
            theirs = theirs_of(one.hub[0].removesuffix("weight") + "e_score_correction_bias")
            yield Piece(f"{inside}expert_bias_E", whole_box((E,)), theirs, whole_box((E,)), (E,))


def spellings(name: str) -> set[str]:
    """Spellings of a name of the spec's `hub` in transformers' modules and in the files of all families."""
    return {name, *(family.hub_name(name) for family in FAMILIES.values())}


def _pieces_of(one: Parameter, names: tuple[str, ...], config: ModelConfig) -> Iterator[Piece]:
    """Pieces of one parameter: heads in the hub's rotary order, one piece for each expert and branch."""
    if one.axes[0] == "heads" and len(names) > 1:
        yield from _heads(one, names, config)
    elif one.role == "norm" and one.axes == ("heads",) and config.qk_norm_scope == "head":
        for a, b, size in _turned(config):
            there = (slice(b, b + size),)
            yield Piece(one.name, (slice(a, a + size),), names[0], there, one.shape)
    else:
        lead = ["expert"] if one.is_expert else []
        lead += ["branch"] if "branch" in one.axes else []
        shape = one.shape[len(lead) :]
        for place in product(*(range(size) for size in one.shape[: len(lead)])):
            at = (*(slice(i, i + 1) for i in place), *whole_box(shape))
            branch = place[-1] if "branch" in lead else 0
            theirs = names[branch].format(expert=place[0] if "expert" in lead else None)
            yield Piece(one.name, at, theirs, whole_box(shape), shape)


def _heads(one: Parameter, names: tuple[str, ...], config: ModelConfig) -> Iterator[Piece]:
    """Pieces of queries, keys and values: our tensor has them group by group, the hub has a tensor for each."""
    d, kv, tail = config.head_size, config.kv_heads, one.shape[1:]
    group = config.num_heads // kv
    q, k, v = names
    num_heads = {q: kv * group, k: kv, v: kv}
    for head in range(kv):
        first = head * (group + 2)
        where = [(q, first + i, head * group + i) for i in range(group)]
        where += [(k, first + group, head), (v, first + group + 1, head)]
        for name, our_head, their_head in where:
            for a, b, size in [(0, 0, d)] if name == v else _turned(config):
                row, other = our_head * d + a, their_head * d + b
                yield Piece(
                    one.name,
                    (slice(row, row + size), *whole_box(tail)),
                    name,
                    (slice(other, other + size), *whole_box(tail)),
                    (num_heads[name] * d, *tail),
                )


def _turned(config: ModelConfig) -> list[tuple[int, int, int]]:
    """Ranges (our start, hub's start, length) of a head's dimensions, which map rotary pairs to rotary pairs.

    We rotate pairs (i, i + d / 2), except for the last ones; the hub rotates pairs (i, i + r / 2) of the first r
    dimensions. Attention scores do not depend on the order.
    """
    d = config.head_size
    turning, still = (round(d * f / 2) for f in (config.rope_fraction, 1 - config.rope_fraction))
    ranges = [(0, 0, turning), (d // 2, turning, turning)]
    behind = [(turning, 2 * turning, still), (d // 2 + turning, 2 * turning + still, still)]
    return ranges + behind if still else [(0, 0, d)]
