"""Experts on a CPU by our own kernels in C (`kernels/cpu`), in one call for all experts.

A row's sums have one order whatever the batch, so what serves an ordinary call serves a batch-invariant one, too. Sums
and pre-activations are FP32; only s * act(h) is rounded to the type of the products.
"""

import torch
from torch import Tensor

from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.library import ExpertMatrices, loaded
from expertmesh.ops.activation import inner_name, num_branches
from expertmesh.ops.dtypes import autocast_dtype, gemm_dtype
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS, ExpertSlice, ExpertWeights
from expertmesh.ops.plain_call import cpu_operator, runs_plainly
from expertmesh.ops.route_metadata import RouteMetadata, check_expert_ids, check_range_of_ids

MOST_ROWS = 64
"""Mean number of rows per live expert up to which dot products are faster than PyTorch's products in FP32
(docs/log.md)."""
_DTYPES = (torch.bfloat16, torch.float32)


def is_loaded() -> bool:
    """Whether the kernels are there."""
    return loaded().kernels is not None


def _has_bf16() -> bool:
    kernels = loaded().kernels
    return kernels is not None and kernels.instructions.has_bf16


# what torch.compiler.assume_constant_result sets, without its import of the compiler: a graph knows the processor
for _constant in (is_loaded, _has_bf16):
    _constant._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dtype_of_rows(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Type in which a token's batch-invariant outputs are rounded before they are added."""
    return dtype if device.type == "cpu" and dtype in _DTYPES and is_loaded() else gemm_dtype(device, dtype)


def serves(c: ExpertsCall) -> bool:
    """Whether a call is computed here: by `forward_of_ids` as long as it has ids only, then by `forward_of_rows`."""
    return serves_ids(c) if c.maps is None else serves_rows(c)


def serves_ids(c: ExpertsCall) -> bool:
    """Whether `forward_of_ids` computes a call with ids: inference, and as fast as any other way or batch-invariant."""
    ids_TK, experts = c.ids_TK, c.experts
    if ids_TK is None:
        return False
    tensors = (
        c.x_TD,
        ids_TK,
        c.weights_TK,
        *experts.parameters,
        *experts.scales_in,
        *experts.scales_out,
    )
    dtype = _dtype_of(c)
    if ids_TK.dim() != 2 or c.weights_TK.dim() != 2 or ids_TK.shape[0] != c.x_TD.shape[0]:
        return False
    if ids_TK.shape[0] != c.weights_TK.shape[0] or ids_TK.shape[1] != c.weights_TK.shape[1]:
        return False
    if not _sees(*tensors) or not _takes(c, dtype) or not _reads(experts, c.x_TD.shape[1], dtype):
        return False
    return is_loaded() and (c.batch_invariant or _is_fast(c, dtype))


def serves_rows(c: ExpertsCall) -> bool:
    """Whether `forward_of_rows` computes a call with `maps`: a batch-invariant one, which may want gradients."""
    is_asked = c.maps is not None and c.batch_invariant and c.x_TD.device.type == "cpu"
    if not is_asked or not _takes(c, c.x_TD.dtype) or loaded().kernels is None:
        return False
    # other formats would be widened whole
    return c.experts.format == "dense" or _reads(c.experts, c.x_TD.shape[1], c.x_TD.dtype)


def _sees(*tensors: Tensor | None) -> bool:
    """Whether the operator takes these tensors: on a CPU, of PyTorch's own types, without gradients; in a graph as
    well."""
    if runs_plainly(*tensors):
        return True
    wants = torch.is_grad_enabled()
    return torch.compiler.is_compiling() and all(
        t is None or (t.is_cpu and not (wants and t.requires_grad)) for t in tensors
    )


def _dtype_of(c: ExpertsCall) -> torch.dtype:
    """Type of the products: autocast's, if it is on."""
    return autocast_dtype(c.x_TD.device) or c.x_TD.dtype


def _takes(c: ExpertsCall, dtype: torch.dtype) -> bool:
    """Whether the kernels compute a call of this type, with weights that they read."""
    return (
        not c.has_adapters
        and c.backend in ("auto", "torch")
        and c.x_TD.dim() == 2
        and c.x_TD.dtype in _DTYPES
        and dtype in _DTYPES
    )


def _reads(experts: ExpertWeights, dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels read the weights where they are stored, for tokens of this width and products of this
    type."""
    if not experts.is_whole or "native" not in FORMATS[experts.format].backends:
        return False
    one = experts.slices()[0]
    if not _fits(one, experts.num_experts, dim):
        return False
    rows = (one.w_in_EGFD, one.w_out_EDF, one.scales_in, one.scales_out, one.b_in_EGF, one.b_out_ED)
    given = [t for t in rows if t is not None]
    is_typed = experts.format != "dense" or one.w_in_EGFD.dtype == one.w_out_EDF.dtype == dtype
    return (
        is_typed
        and all(t.stride(-1) == 1 for t in given)
        and all(t.dtype in _DTYPES for t in given if t.is_floating_point())
    )


def _fits(one: ExpertSlice, num_experts: int, dim: int) -> bool:
    """Whether all sizes fit, as the kernels take them unseen; others go on to the checks of a call with `maps`."""
    w_in, w_out = one.w_in_EGFD, one.w_out_EDF
    if w_in.dim() != 4 or w_out.dim() != 3:
        return False
    E, G, F, per_byte = num_experts, num_branches(one.activation), w_in.shape[2], 1
    if w_in.dtype == torch.uint8:
        per_byte = 2
    rows_in, rows_out = (E, G, F), (E, dim)
    if w_in.shape != (*rows_in, dim // per_byte) or w_out.shape[:2] != rows_out:
        return False
    if w_out.shape[2] * per_byte != F or dim % per_byte:
        return False
    for scales, rows, columns in ((one.scales_in, rows_in, dim), (one.scales_out, rows_out, F)):
        if scales is not None and (scales.shape[:-1] != rows or not scales.shape[-1] or columns % scales.shape[-1]):
            return False
    biases = ((one.b_in_EGF, rows_in), (one.b_out_ED, rows_out))
    return all(b is None or b.shape == rows for b, rows in biases)


def _is_fast(c: ExpertsCall, dtype: torch.dtype) -> bool:
    """Whether nothing else is faster: BF16 by its own instructions, else few rows of an expert, whose number no graph
    knows."""
    assert c.ids_TK is not None
    if dtype == torch.bfloat16 and _has_bf16():
        return True
    if not runs_plainly(c.x_TD):
        return False
    return c.ids_TK.numel() <= MOST_ROWS * min(c.experts.num_experts, max(c.ids_TK.numel(), 1))


def forward_of_ids(c: ExpertsCall) -> Tensor:
    """Compute y (T, D) of a call that `serves_ids` accepts."""
    assert c.ids_TK is not None
    check_expert_ids(c.ids_TK)
    dtype, E = _dtype_of(c), c.experts.num_experts
    # as `checked` does it: biases of quantised experts have the type of the products, too
    one = (c.experts if dtype == c.x_TD.dtype else c.experts.to(dtype)).slices()[0]
    matrices = (one.w_in_EGFD, one.w_out_EDF, one.scales_in, one.scales_out)
    biases, x_TD = (one.b_in_EGF, one.b_out_ED), c.x_TD.to(dtype)
    compute = _of_tensors if runs_plainly(x_TD, c.ids_TK) else _operator
    y_TD: Tensor = compute(x_TD, c.ids_TK, c.weights_TK, *matrices, *biases, one.activation, E)
    return y_TD


def forward_of_rows(c: ExpertsCall, *, save_h: bool) -> tuple[Tensor, list[Tensor]]:
    """Compute y (T, D) of a call with `maps`, the bits of `forward_of_ids`, and H of every slice, which has no rows
    unless save_h.

    Slices are concatenated by a copy.
    """
    assert c.maps is not None
    (_, D), dtype = c.x_TD.shape, c.x_TD.dtype
    experts = c.experts.slices()[0] if _reads(c.experts, D, dtype) else c.experts.joined(dtype)
    ids_TK = ids_of(c.maps, c.weights_TK.shape)
    _, G, F, _ = experts.shape
    num_rows = c.maps.token_of_row_N.shape[0] if save_h else 0
    hidden_RH = c.x_TD.new_empty(num_rows, G * F)
    E, hidden = c.experts.num_experts, hidden_RH if save_h else None
    y_TD = _computed(c.x_TD, ids_TK, c.weights_TK, experts, E, hidden)
    sizes = [one.shape[2] for one in c.experts.slices()]
    if len(sizes) == 1:
        return y_TD, [hidden_RH]
    return y_TD, [
        # copies, as outputs of one operator must not share memory
        h.clone(memory_format=torch.contiguous_format).flatten(1)
        for h in hidden_RH.view(num_rows, G, F).split(sizes, 2)
    ]


def ids_of(maps: RouteMetadata, shape: torch.Size) -> Tensor:
    """(T, K) expert ids, of which `maps` are the order."""
    ids_N = torch.searchsorted(maps.offsets_E[1:], maps.row_of_slot_N, right=True)
    return ids_N.view(shape)


def _computed(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    experts: ExpertSlice,
    num_experts: int,
    hidden_RH: Tensor | None,
) -> Tensor:
    kernels = loaded().kernels
    if kernels is None:
        raise ConfigError(
            "this graph computes experts by the kernels in C, which are not here; install a C compiler, or export it "
            "again"
        )
    b_out_ED, scales_out = experts.b_out_ED, experts.scales_out
    y_TD, least, most = kernels.experts(
        x_TD.contiguous(),
        ids_TK.to(torch.int64).contiguous(),
        weights_TK.to(torch.float32).contiguous(),
        ExpertMatrices(experts.w_in_EGFD, experts.scales_in, experts.b_in_EGF),
        ExpertMatrices(
            experts.w_out_EDF[:, None],
            None if scales_out is None else scales_out[:, None],
            None if b_out_ED is None else b_out_ED[:, None],
        ),
        inner=inner_name(experts.activation),
        num_experts=num_experts,
        hidden_RH=hidden_RH,
    )
    check_range_of_ids(least, most, num_experts)
    return y_TD


def _of_tensors(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    scales_in: Tensor | None,
    scales_out: Tensor | None,
    b_in: Tensor | None,
    b_out: Tensor | None,
    activation: str,
    num_experts: int,
) -> Tensor:
    one = ExpertSlice(w_in, w_out, b_in, b_out, activation, "", scales_in, scales_out)
    return _computed(x_TD, ids_TK, weights_TK, one, num_experts, None)


_operator = cpu_operator(
    "native_experts(Tensor x_TD, Tensor ids_TK, Tensor weights_TK, Tensor w_in, Tensor w_out, Tensor? scales_in, "
    "Tensor? scales_out, Tensor? b_in, Tensor? b_out, str activation, int num_experts) -> Tensor",
    _of_tensors,
    lambda x_TD, *_: torch.empty_like(x_TD, memory_format=torch.contiguous_format),
)
