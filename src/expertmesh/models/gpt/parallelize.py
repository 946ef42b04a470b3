"""Parallelism of a GPT over ranks: FSDP by layer, expert parallelism, and tensor parallelism of attention and dense
layers."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from expertmesh.comm.group import RankGroup
from expertmesh.comm.mesh import divisors
from expertmesh.comm.world import World
from expertmesh.config.run import ParallelConfig
from expertmesh.errors import ConfigError, named
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT, Block, check_sequence
from expertmesh.models.gpt.sizes import tensor_sizes
from expertmesh.moe.module_adapters import adapters_in
from expertmesh.parallel.apply import degrees_of, expert_split, model_device_type, parallelize
from expertmesh.parallel.experts.coordinated import ServingGroups, StepSizes
from expertmesh.parallel.experts.route_split import RouteSplit
from expertmesh.parallel.serving import (
    ServingDegrees,
    bring_rows_home,
    serving_degrees,
    serving_groups,
    slice_unit,
    spread_layers,
)
from expertmesh.parallel.tensor import (
    ShardedStorage,
    SharedSequences,
    Sliced,
    TensorPlan,
    sliced_mlp,
    tensor_group,
)


def parallelize_gpt(
    model: GPT,
    config: ParallelConfig,
    *,
    world: World | None = None,
    bytes_beside: float = 0.0,
    plans: Path | None = None,
) -> World:
    """Spread a GPT over all ranks, in place; see `expertmesh.parallel.apply.parallelize`.

    With a tp_degree, ranks that share sequences call the model with the same whole sequences, and each gets the logits
    of its own positions.
    """
    if world is None:
        world = World(device_type=model_device_type(model), timeout_s=config.timeout_s)
    check_degrees(model.config, config, num_ranks=world.size)
    plan = None
    if config.tp_degree > 1:
        group = tensor_group(world, config.tp_degree)
        plan = _tensor_plan(model, group)
    parallelize(
        model,
        config,
        world=world,
        blocks=model.layers,
        tensor_plan=plan,
        bytes_beside=bytes_beside,
        plans=plans,
    )
    if plan is not None:
        shared = SharedSequences(group)
        model.share_sequences(shared)
        for _, adapter in () if model.output is None else adapters_in(model.output):
            adapter.local = partial(_gathered, shared, adapter)
    return world


def _gathered(shared: SharedSequences, adapter: nn.Module, factor: str) -> Tensor:
    """A whole factor of an adapter whose matrix is stored in parts."""
    return shared.gather(adapter.get_parameter(factor))


def spread_gpt_for_engine(
    model: GPT, config: ParallelConfig, world: World
) -> tuple[ServingDegrees, ServingGroups, StepSizes]:
    """Shard a GPT over ranks that serve requests together, in place; see `expertmesh.parallel.serving`. Every rank must
    call.

    Args:
        model: the model, with equal parameters on all ranks or on the meta device; call `as_plain` once it has its
            weights.

    Returns:
        The degrees, this rank's groups, and the sizes that every step must set.
    """
    degrees = serving_degrees(
        config,
        num_ranks=world.size,
        num_experts=tuple(n for n in model.config.experts_per_layer() if n),
        hidden_dim=model.config.moe.hidden_dim,
        unit=slice_unit(model),
    )
    if degrees.tp > 1:
        _check_slices(model.config, degrees.tp)
    groups, sizes = serving_groups(world, degrees), StepSizes()
    dense: dict[str, Mapping[str, int]] = {}
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        for part in ("attention", "ffn"):
            if cut := _cut(model, f"layers.{index}.{part}"):
                dense[f"layers.{index}.{part}"] = cut
        block.attention.num_heads //= degrees.tp
        block.attention.num_kv_heads //= degrees.tp
    spread_layers(model, world, degrees, groups, sizes, dense)
    if world.size > 1:
        bring_rows_home(model.final_norm, groups, sizes)
    return degrees, groups, sizes


def _cut(model: GPT, module: str) -> dict[str, int]:
    """Axis along which each parameter of a module is cut, by its name in the module; empty if there is no such
    module."""
    inside = f"{module}."
    return {
        one.name.removeprefix(inside): one.tensor_axis
        for one in model.spec
        if one.name.startswith(inside) and one.tensor_axis is not None
    }


def _tensor_plan(model: GPT, group: RankGroup) -> TensorPlan:
    """Tensor-parallel plan: attention by heads, dense layers by hidden size, embedding and output sharded for storage
    only."""
    # Each rank computes all logits of its own tokens. They are as large as the logits of all tokens for a slice of the
    # vocabulary, and any loss function works unchanged.
    is_even = model.config.dim % group.size == 0
    plan: dict[str, Sliced | ShardedStorage] = {
        name: ShardedStorage(cut if is_even else {}) for name in ("embedding", "output") if (cut := _cut(model, name))
    }
    for index, block in enumerate(model.layers):
        assert isinstance(block, Block)
        plan[f"layers.{index}.attention"] = Sliced(
            group,
            _cut(model, f"layers.{index}.attention"),
            once=frozenset({"out.bias"}),
            dim=1,
            where=f"layer {index}, attention",
        )
        if block.ffn is not None:
            plan[f"layers.{index}.ffn"] = sliced_mlp(group, where=f"layer {index}, feed-forward")
    return plan


def check_degrees(
    model: ModelConfig, config: ParallelConfig, *, num_ranks: int, seq_len: int | None = None
) -> list[RouteSplit]:
    """Check the degrees of parallelism of a GPT, before anything is built; returns the splits of its MoE layers'
    experts."""
    degrees = degrees_of(config, num_ranks=num_ranks)
    moe_layers = [n for n in model.experts_per_layer() if n]
    splits = [
        expert_split(
            config,
            degrees=degrees,
            num_experts=num_experts,
            hidden_dim=model.moe.hidden_dim,
            ep_degree=config.ep_degree_of(index, num_moe_layers=len(moe_layers)),
        )
        for index, num_experts in enumerate(moe_layers)
    ]
    if degrees.tp > 1:
        _check_slices(model, degrees.tp)
        if seq_len is not None:
            check_sequence(model, seq_len, tp_degree=degrees.tp)
    return splits


def _check_slices(model: ModelConfig, tp: int) -> None:
    if model.qk_norm and model.qk_norm_scope == "projection":
        raise ConfigError(
            "parallel.tp_degree",
            tp,
            f"cuts attention by heads, and {named('model.qk_norm_scope', 'projection')} is over all of them",
            "use 1",
        )
    sizes = tensor_sizes(model)
    for name, size in sizes.items():
        if size % tp:
            fits = [d for d in divisors(math.gcd(*sizes.values())) if d <= tp]
            raise ConfigError(
                "parallel.tp_degree",
                tp,
                f"must divide {name if ' ' in name else named(name)}, {size}",
                f"the largest that fits this model: {fits[-1]}",
            )
