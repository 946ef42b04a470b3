"""Floating-point operations of layers per token, from its configuration alone.

Only matrix multiplications count, two operations per multiply-add, as is usual (Narayanan et al. 2021, appendix).
Routed experts count as often as tokens pass them (`rows_per_token`): nothing is spent on experts that a token does not
use. Under a capacity this is an upper bound, because dropped rows are not computed.
"""

from expertmesh.config.moe import MoEConfig
from expertmesh.spec.feed_forward import HasFeedForwards, mlp_parameters


def mlp_flops(config: HasFeedForwards, hidden_dim: int) -> int:
    """Operations of a feed-forward network per token."""
    return 2 * mlp_parameters(dim=config.dim, hidden_dim=hidden_dim, activation=config.activation, bias=False)


def router_flops(config: HasFeedForwards, num_experts: int) -> int:
    """Operations of one layer's router per token."""
    moe = config.moe
    if moe.router == "hash":
        return 0
    if moe.router == "cosine":
        return 2 * moe.cosine_dim * (config.dim + num_experts)
    return 2 * config.dim * num_experts


def rows_per_token(moe: MoEConfig, num_experts: int) -> float:
    """Mean number of a layer's routed experts that a token passes in training, with nothing dropped.

    K where tokens choose. Where experts choose, they take as many rows as their capacity holds: K times its factor, at
    most E.
    """
    if moe.router != "expert_choice":
        return moe.top_k
    factors = (moe.capacity_factor or 1.0, moe.max_capacity_factor)
    return min(moe.top_k * min(f for f in factors if f is not None), num_experts)


def experts_flops(config: HasFeedForwards, num_experts: int) -> int:
    """Operations of one layer's routed experts per token."""
    per_row = mlp_flops(config, config.moe.hidden_dim)
    return round(rows_per_token(config.moe, num_experts) * per_row)


def shared_flops(config: HasFeedForwards) -> int:
    """Operations per token of a MoE layer's shared experts and residual MLP, with their gate and mixing coefficient."""
    moe, dim = config.moe, config.dim
    hidden_dim = moe.shared_hidden_dim or moe.num_shared_experts * moe.hidden_dim
    found = mlp_flops(config, hidden_dim) + (2 * dim if moe.shared_gate else 0)
    return found + (mlp_flops(config, config.ffn_hidden_dim) + 4 * dim if moe.residual else 0)
