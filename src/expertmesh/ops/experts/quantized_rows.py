"""Quantised experts for few rows on a CPU, by PyTorch's products that widen weights in registers.

Their speed is the memory bandwidth, so 8 bits take half the time of BF16 and 4 bits a quarter. For more rows of an
expert it is faster to widen its matrices once and multiply as usual, as the "torch" backend does (docs/log.md has the
times). Sizes that `takes` refuses are unsafe: with an odd number of columns the int8 product reads out of bounds.
"""

import torch
from torch import Tensor

from expertmesh.ops.activation import activate_
from expertmesh.ops.dtypes import autocast_dtype, has_products_of
from expertmesh.ops.experts import quantized_loop
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS, ExpertSlice
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.quantized.pack import cpu_reads_blocks
from expertmesh.ops.route_metadata import check_range_of_ids

MOST_ROWS = {"int8": 16, "int4_cpu": 64}
"""Maximum number of rows of one expert; higher for int4, which takes longer to widen."""
MOST_SLOTS = 2048
"""Maximum number of slots; Python sorts this many in the time of a few products."""
_COLUMNS = {"int8": 32, "int4_cpu": 32}
"""Divisor that the numbers of columns must have."""


def serves(c: ExpertsCall) -> bool:
    """Whether `forward` supports this call: few slots, BF16 products, supported sizes, no gradients."""
    w = c.experts
    if c.ids_TK is None or not c.is_direct or w.format not in _COLUMNS or c.x_TD.dim() != 2:
        return False
    one = w.slices()[0]
    assert one.scales_in is not None
    return (
        0 < c.ids_TK.numel() <= MOST_SLOTS
        and runs_plainly(c.x_TD, c.weights_TK, one.w_in_EGFD, one.w_out_EDF, *w.b_in, w.b_out)
        and (autocast_dtype(c.x_TD.device) or c.x_TD.dtype) == torch.bfloat16
        and c.x_TD.dtype != torch.float64
        and one.scales_in.dtype == torch.bfloat16
        and has_products_of(torch.bfloat16)
        and takes(w.format, *FORMATS[w.format].shape(one)[1:])
        and c.x_TD.shape[1] == one.shape[3]
    )


def takes(format: str, num_branches: int, hidden_dim: int, dim: int) -> bool:
    """Whether the products support matrices of these sizes.

    Args:
        format: int8 or int4_cpu.
        num_branches: G.
        hidden_dim: F.
        dim: D.
    """
    unit = _COLUMNS[format]
    if hidden_dim % unit or dim % unit:
        return False
    if format == "int8":
        return hasattr(torch.ops.aten, "_weight_int8pack_mm")
    return (num_branches * hidden_dim) % 64 == 0 and dim % 64 == 0 and cpu_reads_blocks()


def forward(c: ExpertsCall, _: list[Tensor]) -> Tensor | None:
    """Compute y (T, D); None if an expert has so many rows that the general path is faster.

    Raises:
        ConfigError: an id is out of range.
    """
    assert c.ids_TK is not None
    experts = c.experts.slices()[0]
    E, D = experts.shape[0], experts.shape[3]
    (T, K), ids = c.ids_TK.shape, c.ids_TK.flatten().tolist()
    check_range_of_ids(min(ids), max(ids), E)
    dtype = autocast_dtype(c.x_TD.device) or c.x_TD.dtype
    s_N1 = c.weights_TK.reshape(-1, 1).float()
    if T == 1 and max(ids) < E and len(set(ids)) == K:  # the rows are the token's choices in order
        y_RD = _weighted(c.x_TD.expand(K, -1), s_N1, experts, dict.fromkeys(ids, 1))
        return y_RD.sum(0, keepdim=True).to(dtype)
    slots = sorted((i for i, e in enumerate(ids) if e < E), key=ids.__getitem__)
    rows: dict[int, int] = {}
    for slot in slots:
        rows[ids[slot]] = rows.get(ids[slot], 0) + 1
    if max(rows.values(), default=0) > MOST_ROWS[experts.format]:
        return None
    y_TD = torch.zeros(T, D)
    if rows:
        order_N = torch.tensor(slots + [slot // K for slot in slots])
        slots_R, tokens_R = order_N.split(len(slots))
        x_RD, s_R1 = c.x_TD.index_select(0, tokens_R), s_N1.index_select(0, slots_R)
        y_TD.index_add_(0, tokens_R, _weighted(x_RD, s_R1, experts, rows))
    return y_TD.to(dtype)


def _weighted(x_RD: Tensor, s_R1: Tensor, experts: ExpertSlice, rows: dict[int, int]) -> Tensor:
    """Compute the experts' weighted outputs for sorted rows, (R, D) in FP32; biases are added in FP32."""
    h_RH = _multiply(x_RD.to(torch.bfloat16), experts, rows, is_first=True).float()
    if experts.b_in_EGF is not None:
        h_RH += _of_rows(experts.b_in_EGF.flatten(1), rows)
    a_RF = activate_(h_RH, experts.activation)
    y_RD = _multiply(a_RF.mul_(s_R1), experts, rows, is_first=False).float()
    if experts.b_out_ED is not None:
        y_RD += s_R1 * _of_rows(experts.b_out_ED, rows)
    return y_RD


def _of_rows(b_EN: Tensor, rows: dict[int, int]) -> Tensor:
    """(R, N) bias of each row's expert."""
    experts = [e for e, count in rows.items() for _ in range(count)]
    return b_EN.index_select(0, torch.tensor(experts))


def _multiply(
    rows_RK: Tensor, experts: ExpertSlice, rows: dict[int, int], *, is_first: bool
) -> Tensor:
    """Multiply sorted rows by the transposed matrices of their experts, (R, N)."""
    w, scales = experts.w_out_EDF, experts.scales_out
    if is_first:
        w, scales = experts.w_in_EGFD.flatten(1, 2), experts.scales_in
    assert scales is not None
    is_int8 = experts.format == "int8"
    if is_int8 and quantized_loop.is_there(w, len(rows)):
        return quantized_loop.product(rows_RK, w, scales.flatten(1), rows)
    parts = rows_RK.to(torch.bfloat16).split_with_sizes(list(rows.values()))
    if is_int8:
        pairs = zip(rows, parts, strict=True)
        return torch.cat(
            [torch._weight_int8pack_mm(x, w[e], scales[e].flatten()) for e, x in pairs]
        )
    group, multiply = (
        rows_RK.shape[1] // scales.shape[1],
        torch.ops.aten._weight_int4pack_mm_for_cpu,
    )
    return torch.cat(
        [multiply(x, w[e], group, scales[e]) for e, x in zip(rows, parts, strict=True)]
    )
