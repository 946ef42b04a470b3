"""Replacement for the gating functions of `deepspeed.moe.sharded_moe`: choices as dense masks, or as one list per
choice.

Where DeepSpeed keeps arbitrary tokens (k = 1 without random token selection), the first are kept; logits that are
passed in are not changed; fewer tokens than `min_capacity` are no error.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from expertmesh.config.values import check_choice, check_type
from expertmesh.errors import ConfigError
from expertmesh.integrations.deepspeed.rules import check_arguments, check_logits
from expertmesh.moe.capacity import queue_positions

Routes = tuple[Any, ...]
einsum: Callable[..., Tensor] = torch.einsum


def multiplicative_jitter(x: Tensor, device: torch.device, epsilon: float = 1e-2) -> Tensor:
    """The values times numbers between 1 - epsilon and 1 + epsilon."""
    low, high = (torch.tensor(1.0 + e, device=device) for e in (-epsilon, epsilon))
    return x * torch.distributions.Uniform(low, high).rsample(x.shape) if epsilon else x


def gumbel_rsample(shape: torch.Size | tuple[int, ...], device: torch.device) -> Tensor:
    """Gumbel noise of location 0 and scale 1."""
    zero, one = torch.tensor(0.0, device=device), torch.tensor(1.0, device=device)
    return torch.distributions.Gumbel(zero, one).rsample(torch.Size(shape))


def top1gating(
    logits: Tensor,  # (S, E)
    capacity_factor: float,  # rows per expert as a ratio of S / E
    min_capacity: int,  # minimum rows per expert
    used_token: Tensor | None = None,  # (S,) numbers, 0 for tokens that are not routed
    noisy_gate_policy: str | None = None,  # "RSample": Gumbel noise on the choice
    drop_tokens: bool = True,  # False: as many rows as the fullest expert of the ranks has
    use_rts: bool = True,  # keep random tokens, else the first
    ep_group: Any = None,  # ranks that agree on the rows; None: this one
    sparse_routes: bool = False,  # which result
    use_tutel: bool = False,  # no effect
) -> Routes:
    """Choose one expert per token.

    Returns:
        The balance loss, (S, E, C) weights, (S, E, C) bool where they are not 0, and (E,) choices per expert before
        dropping. With `sparse_routes` the loss, C, E, (K, S) int32 experts (-1: dropped), (K, S) int32 rows, (K, S)
        weights, (E,) choices.

    Example:
        >>> loss, weights, mask, counts = top1gating(torch.eye(4), 1.0, 0)
        >>> weights.shape, counts.tolist()
        (torch.Size([4, 4, 1]), [1, 1, 1, 1])
    """
    check_arguments(
        capacity_factor=capacity_factor,
        min_capacity=min_capacity,
        noisy_gate_policy=noisy_gate_policy,
    )
    check_logits(logits, 1, used_token)
    gates = F.softmax(logits, dim=1)
    noisy = logits + gumbel_rsample(logits.shape, logits.device) if noisy_gate_policy == "RSample" else gates
    ids = noisy.argmax(1)
    used = torch.ones_like(ids, dtype=torch.bool) if used_token is None else used_token.reshape(-1) != 0  # fmt: skip
    mask = F.one_hot(ids, logits.shape[1]).to(torch.bool) & used[:, None]
    counts = mask.sum(0)
    capacity = _capacity(logits, capacity_factor, min_capacity)
    if not drop_tokens:
        capacity = min(_fullest(counts, ep_group), len(ids))
    l_aux = (gates.mean(0) * mask.to(gates.dtype).mean(0)).sum() * logits.shape[1]
    first = mask.float() * (torch.rand(mask.shape, device=logits.device) if use_rts else 1.0)
    kept = mask & _largest(first, capacity)
    return _routes(l_aux, capacity, ids[None], kept, gates * kept, counts, sparse_routes)


def top2gating(
    logits: Tensor,  # (S, E)
    capacity_factor: float,  # rows per expert as a ratio of 2 S / E
    min_capacity: int,  # minimum rows per expert
    drop_tokens: bool = True,  # False: as many rows as the fullest expert of the ranks has
    ep_group: Any = None,  # ranks that agree on the rows; None: this one
    top2_2nd_expert_sampling: bool = True,  # Gumbel noise on the second choice
    sparse_routes: bool = False,  # which result
) -> Routes:
    """Choose two experts per token; first choices are served before second ones. See `top1gating`."""
    check_arguments(capacity_factor=capacity_factor, min_capacity=min_capacity)
    check_logits(logits, 2)
    num_tokens, num_experts = logits.shape
    gates = F.softmax(logits, dim=1)
    first = gates.argmax(1)
    if top2_2nd_expert_sampling:
        logits = logits + gumbel_rsample(logits.shape, logits.device)
    second = logits.scatter(1, first[:, None], float("-inf")).argmax(1)
    ids = torch.stack([first, second])
    masks = F.one_hot(ids, num_experts)
    counts = masks.sum((0, 1))
    l_aux = (gates.mean(0) * masks[0].to(gates.dtype).mean(0)).mean() * num_experts**2
    capacity = _fullest(counts, ep_group)
    if drop_tokens:
        capacity = _capacity(gates, 2 * capacity_factor, min_capacity)
    places = queue_positions(ids.reshape(-1), None, num_experts).view(2, num_tokens)
    kept = (masks * (places < capacity)[..., None]).sum(0).bool()
    weights = _normalized(gates * kept)
    return _routes(l_aux, capacity, ids, kept, weights, counts, sparse_routes, places)


def topkgating(
    logits: Tensor,  # (S, E)
    k: int,  # experts per token
    capacity_factor: float,  # rows per expert as a ratio of k S / E
    min_capacity: int,  # minimum rows per expert
    drop_tokens: bool = True,  # False: as many rows as the fullest expert of the ranks has
    ep_group: Any = None,  # ranks that agree on the rows; None: this one
    drop_policy: str = "probs",
    sparse_routes: bool = False,  # which result
) -> Routes:
    """Choose k experts per token. See `top1gating`.

    Args:
        drop_policy: "probs": an expert keeps its tokens of the largest probabilities; "position": the first ones.
    """
    check_choice("drop_policy", drop_policy, ["probs", "position"])
    check_arguments(capacity_factor=capacity_factor, min_capacity=min_capacity)
    check_logits(logits, k)
    num_experts = logits.shape[1]
    gates = F.softmax(logits, dim=1)
    ids = gates.topk(k, dim=1).indices
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, ids, True)
    counts = mask.sum(0)
    l_aux = (gates.mean(0) * mask.to(gates.dtype).mean(0)).mean() * num_experts**2 / k
    capacity = _fullest(counts, ep_group)
    if drop_tokens:
        capacity = _capacity(gates, k * capacity_factor, min_capacity)
        mask = mask & _largest(gates * mask if drop_policy == "probs" else mask.float(), capacity)
    weights = _normalized(gates * mask)
    return _routes(l_aux, capacity, ids.T, mask, weights, counts, sparse_routes)


class TopKGate(nn.Module):
    """A gate: logits of a linear map, and the choices of `top1gating`, `top2gating` or `topkgating`.

    Example:
        >>> gate = TopKGate(8, 4, k=2, min_capacity=0)
        >>> loss, weights, mask, counts = gate(torch.randn(16, 8))
    """

    def __init__(
        self,
        model_dim: int,  # size of a token (D)
        num_experts: int,  # E
        k: int = 1,  # experts per token
        capacity_factor: float = 1.0,  # rows per expert as a ratio of the even share, in training
        eval_capacity_factor: float = 1.0,  # that in evaluation
        min_capacity: int = 8,  # minimum rows per expert
        noisy_gate_policy: str | None = None,  # None, "Jitter" or "RSample", in training
        drop_tokens: bool = True,  # False: no capacity
        use_rts: bool = True,  # random token selection for k = 1
        ep_group: Any = None,  # ranks that agree on the rows; None: this one
        top2_2nd_expert_sampling: bool = True,  # for k = 2, Gumbel noise on the second choice
    ) -> None:
        super().__init__()
        check_arguments(
            model_dim=model_dim,
            num_experts=num_experts,
            k=k,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity,
            noisy_gate_policy=noisy_gate_policy,
            drop_tokens=drop_tokens,
            use_rts=use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group, self.k, self.min_capacity = ep_group, k, min_capacity
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.drop_tokens = noisy_gate_policy, drop_tokens
        self.use_rts, self.top2_2nd_expert_sampling = use_rts, top2_2nd_expert_sampling

    def forward(
        self,
        input: Tensor,
        used_token: Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> Routes:
        """The result of the gating function for (S, D) tokens."""
        check_type("input", input, Tensor, "a tensor")
        if input.dim() != 2 or input.shape[1] != self.wg.in_features:
            raise ConfigError(
                f"input of shape {tuple(input.shape)}: must be (tokens, {self.wg.in_features}); reshape it"
            )
        x = input.float()
        if self.noisy_gate_policy == "Jitter" and self.training:
            x = multiplicative_jitter(x, x.device)
        logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        how: dict[str, Any] = {"drop_tokens": self.drop_tokens, "ep_group": self.ep_group}
        how |= {"sparse_routes": sparse_routes}
        if self.k == 1:
            noise = self.noisy_gate_policy if self.training else None
            how |= {"noisy_gate_policy": noise, "use_rts": self.use_rts}
            return top1gating(logits, factor, self.min_capacity, used_token, **how)
        if self.k == 2:
            how |= {"top2_2nd_expert_sampling": self.top2_2nd_expert_sampling}
            return top2gating(logits, factor, self.min_capacity, **how)
        return topkgating(logits, self.k, factor, self.min_capacity, **how)


def _capacity(gates: Tensor, factor: float, least: int) -> int:
    share = gates.shape[0] / gates.shape[1] * torch.tensor(factor)  # FP32, as theirs
    return max(int(torch.ceil(share)), least)


def _fullest(counts: Tensor, group: Any) -> int:
    """Rows of the fullest expert on any rank of the group."""
    fullest = counts.max()
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(fullest, op=dist.ReduceOp.MAX, group=group)
    return int(fullest)


def _largest(values: Tensor, most: int) -> Tensor:
    """Mask (S, E) of so many largest values of each column, of equal ones the first."""
    order = values.sort(dim=0, descending=True, stable=True).indices[:most]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(0, order, True)


def _normalized(weights: Tensor) -> Tensor:
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def _routes(
    l_aux: Tensor,  # the balance loss
    capacity: int,  # C
    ids: Tensor,  # (K, S) experts
    kept: Tensor,  # (S, E) bool, choices that are not dropped
    weights: Tensor,  # (S, E)
    counts: Tensor,  # (E,)
    sparse: bool,  # which result
    places: Tensor | None = None,  # (K, S) rows; None: in the order of tokens that are kept
) -> Routes:
    """A gating function's result."""
    is_kept = kept.T.gather(0, ids) if ids.shape[1] else torch.zeros_like(ids, dtype=torch.bool)
    if places is None:
        places = (kept.cumsum(0) - 1).T.gather(0, ids)
    places = places * is_kept
    chosen = weights.T.gather(0, ids)
    if sparse:
        experts = ids.masked_fill(~is_kept, -1).to(torch.int32)
        return l_aux, capacity, kept.shape[1], experts, places.to(torch.int32), chosen, counts
    tokens = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    at = (tokens[is_kept], ids[is_kept], places[is_kept])
    dense = weights.new_zeros(*kept.shape, capacity).index_put(at, chosen[is_kept])
    return l_aux, dense, dense.bool(), counts
