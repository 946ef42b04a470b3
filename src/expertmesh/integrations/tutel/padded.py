"""Tutel's routing into rows of equal number per expert, (E, C, D), with the losses that go with it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from expertmesh.config.values import check_choice
from expertmesh.errors import ConfigError
from expertmesh.integrations.tutel.net import Group, simple_all_reduce
from expertmesh.integrations.tutel.rules import check_numbers
from expertmesh.moe.capacity import count_all_choices, priority_order, queue_positions
from expertmesh.moe.losses import importance_load_loss

Loss = Callable[[Tensor, Tensor], Tensor]


class Routed(NamedTuple):
    """Choices of T tokens, one list entry per rank of the choice (K entries)."""

    num_global_experts: int
    indices_s: list[Tensor]
    """(T,) int32 expert of each token."""
    locations_s: list[Tensor]
    """(T,) int32 row of each token among its expert's; from `capacity` on the token is dropped."""
    gates_s: list[Tensor]
    """(T,) routing weights."""
    capacity: int
    """Rows per expert."""
    dispatch_count: Tensor
    """(E,) int32 choices per expert, before dropping."""


def gshard_loss(scores: Tensor, topk_ids: Tensor) -> Tensor:
    """E times the mean over experts of probability times share of first choices: 1 at balance."""
    num_tokens, num_experts = max(scores.shape[0], 1), scores.shape[1]
    counts = count_all_choices(topk_ids[:, :1], num_experts).to(scores.dtype)
    return (scores.sum(0) * counts).sum() * num_experts / num_tokens / num_tokens


def load_importance_loss(logits: Tensor, noisy: Tensor, ids: Tensor, noise_std: float) -> Tensor:
    """Importance and load loss with variances over E - 1.

    Args:
        logits: (T, E), without noise.
        noisy: (T, E) logits with noise, which decided.
        ids: (T, K) choices.
        noise_std: standard deviation of the noise; 0: the load is the number of choices.
    """
    load = None
    if noise_std:
        threshold = noisy.gather(1, ids[:, -1:]).float()
        load = torch.special.ndtr((logits.float() - threshold) / noise_std)
    num_experts = logits.shape[1]
    counts = count_all_choices(ids, num_experts)[None]
    loss = importance_load_loss(F.softmax(logits.float(), dim=1), counts, load_TE=load)
    return loss * unbiased(num_experts)


def unbiased(num_experts: int) -> float:
    """Factor from variances over E, as ours are, to variances over E - 1, as Tutel's are."""
    return num_experts / max(num_experts - 1, 1)


def rows_per_expert(num_tokens: int, num_experts: int, top_k: int, factor: float, alignment: int = 1) -> int:
    """Rows of an expert: K times the even share, rounded up, times the factor, rounded down; a multiple of
    `alignment`."""
    rows = top_k * int(abs(factor) * -(-num_tokens // num_experts))
    return rows + -rows % alignment


def extract_critical(
    scores: Tensor,  # (T, E) probabilities
    top_k: int,  # experts per token; at most E are taken
    loss_fn: Loss | None = gshard_loss,  # called with the scores and the (T, K) experts
    capacity_factor: float = 1.0,
    batch_prioritized_routing: bool = False,  # tokens with the largest probabilities come first
    normalize_gate: bool = True,  # for K > 1, weights sum to one
    alignment: int = 1,  # rows per expert are a multiple of it
    group: Group = None,  # the ranks that agree on the number of rows; None: all
    inequivalent_tokens: bool = False,  # ranks have different numbers of tokens
) -> tuple[Routed, Tensor | None]:
    """Choose experts, and a row of its expert for each choice.

    Args:
        capacity_factor: above 0: rows per expert as a ratio of the even share; 0: as many as the fullest expert has;
            below 0: that, and at most that ratio.

    Example:
        >>> routed, loss = extract_critical(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), top_k=1)
        >>> routed.capacity, routed.locations_s
        (1, [tensor([0, 1], dtype=torch.int32)])
    """
    if top_k < 1:
        raise ConfigError(f"top_k={top_k}: a token needs an expert; give at least 1")
    check_numbers(capacity_factor=capacity_factor)
    if scores.dim() != 2:
        raise ConfigError(f"scores of shape {tuple(scores.shape)}: must be (tokens, experts); reshape them")
    num_tokens, num_experts = scores.shape
    top_k = min(top_k, num_experts)
    ids = torch.topk(scores, top_k, dim=1).indices
    gates = scores.gather(1, ids)
    loss = None if loss_fn is None else loss_fn(scores, ids)
    order = None
    if batch_prioritized_routing:
        order = priority_order(scores.detach().amax(1), top_k)
    places = queue_positions(ids.T.reshape(-1), order, num_experts).view(top_k, num_tokens)
    counts = count_all_choices(ids, num_experts)
    if top_k > 1 and normalize_gate:
        gates = gates / gates.sum(1, keepdim=True).clamp(min=torch.finfo(gates.dtype).eps)
    agreed = torch.tensor(num_tokens, device=scores.device)
    if inequivalent_tokens:
        agreed = simple_all_reduce(agreed, group, dist.ReduceOp.MAX)
    capacity = rows_per_expert(int(agreed), num_experts, top_k, capacity_factor, alignment)
    if capacity_factor <= 0:
        fullest = int(simple_all_reduce(counts.max(), group, dist.ReduceOp.MAX))
        fullest += -fullest % alignment
        capacity = min(fullest, capacity) if capacity_factor < 0 else fullest
    return Routed(
        num_experts,
        [i.to(torch.int32) for i in ids.unbind(1)],
        [p.to(torch.int32) for p in places.unbind(0)],
        list(gates.unbind(1)),
        capacity,
        counts.to(torch.int32),
    ), loss


top_k_routing = extract_critical


def get_topk_selection(critial_data: Routed) -> tuple[Tensor, Tensor]:
    """(T, K) int64 experts of the tokens, best first, and (E,) int32 choices per expert."""
    return torch.stack(critial_data[1], 1).long(), critial_data[5]


def get_reversed_sample_ids(critial_data: Routed, return_id_type: str = "sample_id") -> Tensor:
    """Origin of each row of an expert, (E, C) int32; -1 for rows without a token.

    Args:
        return_id_type: "sample_id": the token; "top_id": the rank of the choice, 0 to K - 1.

    Example:
        >>> routed, _ = extract_critical(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), top_k=1)
        >>> get_reversed_sample_ids(routed).tolist()
        [[0], [-1]]
    """
    check_choice("return_id_type", return_id_type, ["sample_id", "top_id"])
    num_experts, ids_s, places_s, _, capacity, _ = critial_data
    ids = torch.arange(len(ids_s[0]), dtype=torch.int32, device=ids_s[0].device)
    found = ids.new_full((num_experts, capacity), -1)
    for choice, (experts, places) in enumerate(zip(ids_s, places_s, strict=True)):
        kept = places < capacity
        came = ids[kept] if return_id_type == "sample_id" else choice
        found[experts[kept].long(), places[kept].long()] = came
    return found


class fast_dispatcher:  # noqa: N801
    """Movement of tokens (T, D) to rows (E * C, D) and back; `update` gives the choices.

    Args:
        capacity: C, if `update` gives none.
    """

    def __init__(self, num_global_experts: int, capacity: int, model_dim: int, dispatch_dtype: torch.dtype) -> None:
        self.num_global_experts, self.capacity = int(num_global_experts), int(capacity)
        self.model_dim, self.original_dtype = int(model_dim), dispatch_dtype

    def update(
        self,
        indices_: Sequence[Tensor],
        locations_: Sequence[Tensor],
        gates_: Sequence[Tensor],
        capacity: int | None = None,
        is_postscore: bool = True,
    ) -> None:
        """Take other choices, see `Routed`; `is_postscore`: weights multiply the experts' results, else their input."""
        self.capacity, self.is_postscore = int(capacity or self.capacity), is_postscore
        end = self.num_global_experts * self.capacity
        self.gates_ = list(gates_)
        self._rows = []
        for ids, places in zip(indices_, locations_, strict=True):
            rows = ids.long() * self.capacity + places.long()
            self._rows.append(rows.masked_fill((places >= self.capacity) | (ids < 0), end))

    def encode(self, data: Tensor) -> Tensor:
        """(T, D) to (E * C, D); rows without a token are zero."""
        end = self.num_global_experts * self.capacity
        rows = data.new_zeros(end + 1, data.shape[-1])
        for places, gates in zip(self._rows, self.gates_, strict=True):
            sent = data if self.is_postscore else data * gates.to(data.dtype)[:, None]
            rows = rows.index_add(0, places, sent)
        return rows[:end].to(self.original_dtype)

    def decode(self, data: Tensor) -> Tensor:
        """(E * C, D) to (T, D); what was dropped is zero."""
        rows = F.pad(data.reshape(-1, data.shape[-1]), (0, 0, 0, 1))
        tokens = [rows[places] for places in self._rows]
        if self.is_postscore:
            gates = [g.to(data.dtype)[:, None] for g in self.gates_]
            tokens = [t * g for t, g in zip(tokens, gates, strict=True)]
        return torch.stack(tokens).sum(0).to(self.original_dtype)


def fast_encode(data: Tensor, critial_data: Routed, is_postscore: bool = True) -> Tensor:
    """Tokens (T, D) to rows (E, C, D) of their experts."""
    if len(data) != len(critial_data[1][0]):
        raise ConfigError(
            f"data of {len(data)} tokens: the choices are of {len(critial_data[1][0])}; give the same tokens"
        )
    dispatcher = _dispatcher(data, critial_data, is_postscore)
    return dispatcher.encode(data).view(critial_data[0], -1, data.shape[-1])


def fast_decode(data: Tensor, critial_data: Routed, is_postscore: bool = True) -> Tensor:
    """Rows (E, C, D) to tokens (T, D), weighted sums over the choices."""
    rows = critial_data[0] * critial_data[4]
    if data.shape[:-1].numel() != rows:
        raise ConfigError(
            f"data of {data.shape[:-1].numel()} rows: {critial_data[0]} experts have {critial_data[4]} each; give "
            "what fast_encode gave"
        )
    return _dispatcher(data, critial_data, is_postscore).decode(data)


def _dispatcher(data: Tensor, routed: Routed, is_postscore: bool) -> fast_dispatcher:
    dispatcher = fast_dispatcher(routed[0], 0, data.shape[-1], data.dtype)
    dispatcher.update(*routed[1:5], is_postscore=is_postscore)
    return dispatcher


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """Cumulative sum along the rows of a matrix, less one."""
    if data.dim() != 2 or dim != 0:
        raise ConfigError(f"data of shape {tuple(data.shape)}, dim={dim}: must be a matrix and 0; reshape it")
    return torch.cumsum(data, 0) - 1
