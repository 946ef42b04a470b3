"""What a Swin Transformer costs: parameters, multiply-adds per image, memory, from its configuration alone."""

from dataclasses import dataclass

from expertmesh.costs.memory import memory_by_size
from expertmesh.costs.run import RunCosts
from expertmesh.models.swin.config import SwinConfig, SwinRunConfig

_POSITION_HIDDEN = 512


@dataclass(frozen=True)
class BlockParameters:
    """Parameters of one block.

    Attributes:
        dense: all but the routed experts.
        expert: one expert; 0 of a dense block.
        num_experts: of the block.
    """

    dense: int
    expert: int
    num_experts: int


def block_parameters(config: SwinConfig) -> tuple[BlockParameters, ...]:
    """The blocks of all stages in their order."""
    is_v2, moe, found = config.variant == "v2", config.moe, []
    for stage, counts in enumerate(config.experts_per_block()):
        dim, heads = config.stage_dims[stage], config.num_heads[stage]
        hidden = round(config.mlp_ratio * dim)
        attention = 4 * dim * dim + (3 * dim + heads if is_v2 else 4 * dim) + 4 * dim
        attention += 3 * _POSITION_HIDDEN + _POSITION_HIDDEN * heads
        mlp = 2 * dim * hidden + hidden + (dim if is_v2 else 0)
        for num_experts in counts:
            beside = mlp if not num_experts else 0
            if num_experts:
                of_router = {"cosine": moe.cosine_dim * (dim + num_experts) + 1, "hash": 0}
                beside = of_router.get(moe.router, dim * num_experts)
                beside += _shared_parameters(config, dim, hidden)
            found.append(
                BlockParameters(attention + beside, mlp if num_experts else 0, num_experts)
            )
    return tuple(found)


def _shared_parameters(config: SwinConfig, dim: int, hidden: int) -> int:
    """What a MoE block has beside router and experts: shared experts and their gate, a residual MLP and its coefficient."""
    moe = config.moe
    shared = moe.shared_hidden_dim or moe.num_shared_experts * hidden
    count = 2 * dim * shared + shared + dim if shared else 0
    count += dim if shared and moe.shared_gate else 0
    return count + (2 * dim * hidden + hidden + dim + 2 * dim + 2 if moe.residual else 0)


def muon_parameters(config: SwinConfig) -> int:
    """Parameters that Muon updates: the matrices of attention, feed-forward layers, experts and merges."""
    moe, found = config.moe, sum(8 * dim * dim for dim in config.stage_dims[:-1])
    for stage, counts in enumerate(config.experts_per_block()):
        dim = config.stage_dims[stage]
        hidden = round(config.mlp_ratio * dim)
        beside = moe.shared_hidden_dim or moe.num_shared_experts * hidden
        beside += hidden if moe.residual else 0
        for num_experts in counts:
            width = num_experts * hidden + beside if num_experts else hidden
            found += 4 * dim * dim + 2 * dim * width
    return found


def outside_parameters(config: SwinConfig) -> int:
    """Parameters outside the blocks: patches, merges, last norm and head."""
    first, last = config.stage_dims[0], config.stage_dims[-1]
    norm = 4 if config.variant == "v2" else 8
    merges = sum(8 * dim * dim + norm * dim for dim in config.stage_dims[:-1])
    patches = first * (config.num_channels * config.patch_size**2 + 3)
    return patches + merges + 2 * last + (last + 1) * config.num_classes


def count_multiply_adds(config: SwinConfig) -> int:
    """Multiply-adds of one forward pass of one image, as Swin's publications count them.

    Products of matrices, and one for each element of a norm's input. Position biases, which do not depend on the image, and
    softmax count nothing. A MoE block computes K experts per token, or K times the capacity factor where there is one.
    """
    moe, norm = config.moe, 4 if config.variant == "released" else 2
    first = config.map_sides[0] ** 2 * config.dim
    total = first * (config.num_channels * config.patch_size**2 + 1)
    for stage, counts in enumerate(config.experts_per_block()):
        dim, tokens = config.stage_dims[stage], config.map_sides[stage] ** 2
        window = config.windows[stage] ** 2
        hidden = round(config.mlp_ratio * dim)
        mlp = 2 * tokens * dim * hidden
        total += len(counts) * tokens * (4 * dim * dim + 2 * window * dim + 2 * dim)
        for num_experts in counts:
            share = moe.top_k * (moe.capacity_factor or 1.0) if num_experts else 1.0
            total += round(mlp * share) + tokens * dim * num_experts
            if num_experts:
                total += tokens * _multiply_adds_beside(config, dim, hidden)
        if stage + 1 < len(config.depths):
            total += tokens // 4 * (8 * dim * dim + norm * dim)
    last = config.stage_dims[-1]
    return total + config.map_sides[-1] ** 2 * last + last * config.num_classes


def _multiply_adds_beside(config: SwinConfig, dim: int, hidden: int) -> int:
    """Per token of a MoE block: shared experts and their gate, a residual MLP and its coefficient."""
    moe = config.moe
    width = 2 * (moe.shared_hidden_dim or moe.num_shared_experts * hidden) + moe.shared_gate
    return dim * (width + (2 * hidden + 2 if moe.residual else 0))


def _activation_elements(config: SwinConfig) -> int:
    """Elements that one image keeps for the backward pass."""
    total = 0
    for stage, depth in enumerate(config.depths):
        dim, tokens = config.stage_dims[stage], config.map_sides[stage] ** 2
        scores = config.num_heads[stage] * config.windows[stage] ** 2
        hidden = round(config.mlp_ratio * dim)
        total += depth * tokens * (11 * dim + 2 * hidden + 3 * scores)
    return total


def swin_costs(config: SwinRunConfig, *, num_ranks: int, dtype: str) -> RunCosts:
    """The costs of training a Swin Transformer.

    Args:
        config: the run; its degrees fit the ranks.
        num_ranks: the number of ranks of the world.
        dtype: compute dtype: float32, bfloat16, float16 or float64.
    """
    model, train, blocks = config.model, config.train, block_parameters(config.model)
    outside = outside_parameters(model)
    total = outside + sum(b.dense + b.num_experts * b.expert for b in blocks)
    active = outside + sum(b.dense + min(model.moe.top_k, b.num_experts) * b.expert for b in blocks)
    images = train.samples_per_pass
    alone, each = memory_by_size(
        total,
        outside=outside,
        layers=[b.dense for b in blocks],
        muon_parameters=muon_parameters(model) if config.optim.name == "muon" else 0,
        activation_elements=images * _activation_elements(model),
        parallel=config.parallel,
        num_ranks=num_ranks,
        dtype=dtype,
    )
    return RunCosts(
        parameters=total,
        active=active,
        num_items=train.steps * train.batch_size,
        flops_per_item=6 * count_multiply_adds(model),
        alone=alone,
        each=each,
    )
