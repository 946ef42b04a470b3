"""Stable order of (token, choice) slots by expert: the map between slots and rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from expertmesh.config.values import WHOLE, Number
from expertmesh.errors import ConfigError
from expertmesh.ops import reference
from expertmesh.ops.backend import resolve_backend
from expertmesh.ops.check import INTEGERS, Arg, check_bounds, check_tensor
from expertmesh.ops.plain_call import can_look_at, runs_plainly

MOST_TRITON_EXPERTS = 2047
"""Maximum number of experts of the Triton kernels, which hold one value per expert in one program;
`kernels.route_metadata.MAX_EXPERTS`."""

NO_EXPERT = " (num_experts, which means no expert)"
_NUM_EXPERTS = Number(1, 65535, types=WHOLE)
_IDS = Arg("TK", INTEGERS, "experts of each token")


@dataclass(frozen=True)
class RouteMetadata:
    """Map between slots (slot = t * K + j, token t's j-th choice) and rows sorted by expert; a pytree.

    Rows of one expert are in slot order. Slots without an expert (dropped, masked) sort behind all rows, so a
    slot is live if and only if row_of_slot < offsets[-1].

    Attributes:
        offsets_E: (E + 1,) int32, exclusive prefix sum of rows: expert e owns rows [offsets[e], offsets[e + 1]).
        token_of_row_N: (R,) int32, the token of each row; rows from offsets[-1] on belong to dead slots.
        slot_of_row_N: (R,) int32, the slot of each row.
        row_of_slot_N: (T * K,) int32, the row of each slot.
    """

    offsets_E: Tensor
    token_of_row_N: Tensor
    slot_of_row_N: Tensor
    row_of_slot_N: Tensor


torch.utils._pytree.register_dataclass(
    RouteMetadata,
    field_names=["offsets_E", "token_of_row_N", "slot_of_row_N", "row_of_slot_N"],
    drop_field_names=[],
)


def route_metadata(
    expert_ids_TK: Tensor,
    num_experts: int,
    *,
    max_rows: int | None = None,
    backend: str = "auto",
) -> RouteMetadata:
    """Sort the (token, choice) slots stably by expert, in time linear in their number.

    Args:
        expert_ids_TK: (T, K) integers in [0, num_experts]; num_experts means "no expert". Detached.
        num_experts: E.
        max_rows: upper bound on the number of live rows, guaranteed by the caller (E * C with a capacity); tensors over
            rows get this length.
        backend: see `resolve_backend`.

    Returns:
        The metadata with R = min(T * K, max_rows). Does not synchronise with the device.

    Raises:
        ConfigError: shape or dtype of the ids is wrong, or (torch backend on the CPU only) an id is out of range; the
            triton backend treats such ids as "no expert".

    Example:
        >>> maps = route_metadata(torch.tensor([[1, 0], [1, 2]]), 2)  # 2 is "no expert"
        >>> maps.offsets_E.tolist(), maps.token_of_row_N[:3].tolist()
        ([0, 1, 3], [0, 0, 1])
    """
    check_expert_ids(expert_ids_TK)
    _NUM_EXPERTS.check("num_experts", num_experts)
    ids = expert_ids_TK.detach()
    name = resolve_backend(backend, ids.device, torch.float32)
    if name == "reference":
        return RouteMetadata(*reference.route_metadata(ids, num_experts, max_rows))
    if name == "triton" and num_experts > MOST_TRITON_EXPERTS:
        if backend == "triton":
            raise ConfigError(
                f"num_experts is {num_experts}; backend='triton' takes up to {MOST_TRITON_EXPERTS}; use backend='torch'"
            )
        name = "torch"
    run = _sorted if name == "torch" and runs_plainly(ids) else _route_metadata
    return RouteMetadata(*run(ids, num_experts, max_rows, name))


def _num_rows(num_slots: int, max_rows: int | None) -> int:
    return num_slots if max_rows is None else torch.sym_min(num_slots, max_rows)


def check_expert_ids(expert_ids_TK: Tensor) -> None:
    """Raise ConfigError unless expert ids are (tokens, top_k) integers."""
    # every layer asks twice: the words are looked for only where they are needed
    if expert_ids_TK.dim() != 2 or expert_ids_TK.dtype not in INTEGERS.dtypes:
        check_tensor("expert_ids", expert_ids_TK, _IDS, {})


def check_range_of_ids(least: int, most: int, num_experts: int) -> None:
    """Raise ConfigError unless the smallest and the largest expert id are in 0..num_experts."""
    fix = "check the router"
    check_bounds("expert_ids", least, most, most=num_experts, fix=fix, note=NO_EXPERT)


def check_tokens(x_TD: Tensor, metadata: RouteMetadata) -> None:
    """Raise ConfigError if the number of tokens does not fit the metadata: a kernel would read out of bounds.

    The number of choices must be a multiple of it; where the host can read the maps, they must be of as many tokens.
    """
    num_tokens, num_slots = x_TD.shape[0], metadata.row_of_slot_N.shape[0]
    fits = not (num_slots % num_tokens if num_tokens else num_slots)
    if fits and num_tokens and can_look_at(metadata.token_of_row_N):
        live = int(metadata.offsets_E[-1])
        slots_N, tokens_N = metadata.slot_of_row_N[:live], metadata.token_of_row_N[:live]
        fits = torch.equal(slots_N // (num_slots // num_tokens), tokens_N)
    if not fits:
        raise ConfigError(
            f"x has {num_tokens} tokens and the metadata {num_slots} choices of another number; they must be of the "
            "same tokens; give the tokens that were routed"
        )


def check_rows(y_RD: Tensor, metadata: RouteMetadata, top_k: int) -> None:
    """Raise ConfigError if the number of rows does not fit the metadata: a kernel would read out of bounds."""
    num_rows, num_slots = metadata.token_of_row_N.shape[0], metadata.row_of_slot_N.shape[0]
    if y_RD.shape[0] != num_rows or top_k < 1 or num_slots % top_k:
        raise ConfigError(
            f"y has {y_RD.shape[0]} rows and top_k is {top_k}; the metadata are of {num_rows} rows and {num_slots} "
            "choices, which top_k must divide; check both"
        )


def _sorted(
    expert_ids_TK: Tensor, num_experts: int, max_rows: int | None, backend: str = "torch"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if backend == "triton":
        from expertmesh.kernels import route_metadata as kernels

        num_rows = _num_rows(expert_ids_TK.numel(), max_rows)
        return kernels.route_metadata(expert_ids_TK, num_experts, num_rows)
    top_k = max(expert_ids_TK.shape[1], 1)
    ids_N = expert_ids_TK.reshape(-1)
    num_slots = ids_N.numel()
    num_rows = _num_rows(num_slots, max_rows)
    if ids_N.device.type == "cpu" and num_slots:
        least, most = map(int, torch.aminmax(ids_N))
        check_range_of_ids(least, most, num_experts)
    # PyTorch's CPU build sorts int32 keys by radix sort, which is linear in the number of slots.
    sorted_N, slot_of_row_N = torch.sort(ids_N.to(torch.int32), stable=True)
    bounds_E = torch.arange(num_experts + 1, dtype=torch.int32, device=ids_N.device)
    offsets_E = torch.searchsorted(sorted_N, bounds_E, out_int32=True)
    row_of_slot_N = torch.empty(num_slots, dtype=torch.int32, device=ids_N.device)
    rows_N = torch.arange(num_slots, dtype=torch.int32, device=ids_N.device)
    row_of_slot_N.scatter_(0, slot_of_row_N, rows_N)
    slot_of_row_N = slot_of_row_N[:num_rows].to(torch.int32)
    return offsets_E, slot_of_row_N // top_k, slot_of_row_N, row_of_slot_N


_route_metadata = torch.library.custom_op("expertmesh::route_metadata", _sorted, mutates_args=())


@_route_metadata.register_fake
def _(
    expert_ids_TK: Tensor, num_experts: int, max_rows: int | None, backend: str = "torch"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_slots = expert_ids_TK.shape[0] * expert_ids_TK.shape[1]
    num_rows = _num_rows(num_slots, max_rows)

    def empty(size: int) -> Tensor:
        return expert_ids_TK.new_empty((size,), dtype=torch.int32)

    return empty(num_experts + 1), empty(num_rows), empty(num_rows), empty(num_slots)


OPERATOR = torch.ops.expertmesh.route_metadata.default
"""Operator as graphs and dispatch modes see it, for policies by operator (activation checkpointing)."""
