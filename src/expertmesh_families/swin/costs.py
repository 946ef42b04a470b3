"""Costs of training a Swin Transformer from its configuration alone: parameters, multiply-adds per image, memory."""

from expertmesh.config.cluster import Precision
from expertmesh.costs.run_costs import RunCosts, SampleSizes, memory_of
from expertmesh_families.swin.config import SwinConfig, SwinRunConfig
from expertmesh_families.swin.spec import swin_spec


def count_multiply_adds(config: SwinConfig) -> int:
    """Multiply-adds of a forward pass of one image, as Swin's publications count them.

    Matrix products count, and one per element of a norm's input. Position biases, which do not depend on the image, and
    softmax do not count. A MoE block computes K experts per token, or K times its capacity factor if it has one.
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
    """Multiply-adds per token of a MoE block outside its routed experts: shared experts and gate, residual MLP and
    coefficient."""
    moe = config.moe
    width = 2 * (moe.shared_hidden_dim or moe.num_shared_experts * hidden) + moe.shared_gate
    return dim * (width + (2 * hidden + 2 if moe.residual else 0))


def _activation_elements(config: SwinConfig) -> int:
    """Elements that one image saves for the backward pass."""
    total = 0
    for stage, depth in enumerate(config.depths):
        dim, tokens = config.stage_dims[stage], config.map_sides[stage] ** 2
        scores = config.num_heads[stage] * config.windows[stage] ** 2
        hidden = round(config.mlp_ratio * dim)
        total += depth * tokens * (11 * dim + 2 * hidden + 3 * scores)
    return total


def swin_costs(config: SwinRunConfig, *, num_ranks: int, dtype: Precision, on_gpu: bool = False) -> RunCosts:
    """The costs of training a Swin Transformer."""
    model, train, spec = config.model, config.train, swin_spec(config.model)
    sizes = SampleSizes(spec, _activation_elements(model))
    return RunCosts(
        parameters=spec.num_parameters,
        active=spec.num_active,
        num_items=train.steps * train.batch_size,
        flops_per_item=6 * count_multiply_adds(model),
        memory=memory_of(sizes, config, num_ranks=num_ranks, dtype=dtype, on_gpu=on_gpu),
    )
