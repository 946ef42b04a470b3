"""Experts on a CPU with AMX for some rows per expert, without gradients: one product with all experts' weights as the left factor.

Before oneDNN multiplies, it rearranges the right factor for AMX's tiles, and reads the left factor as it is stored. In
x W^T the right factor is the weight, whose rearranging takes as long as reading it; in W x^T it is a few tokens. Up to
16 rows of an expert take the time of one, so every expert gets as many places as the fullest has rows.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from expertmesh.ops.activation import activate_
from expertmesh.ops.experts.call import ExpertsCall
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.ops.plain_call import runs_plainly
from expertmesh.ops.route_metadata import route_metadata

FEWEST_WEIGHTS = 1 << 20
"""Fewest elements of w_in; smaller ones stay in the caches, and calls take longer than products."""
CHOICES = 2, 8
"""Fewest and most choices per expert. With fewer, each choice's weights are read as fast by themselves; with more, a
product for each expert with rows is as fast.
"""
MOST_ROWS = 32
"""Maximum number of rows of an expert: two tiles of 16 columns."""
_FEWEST_LIVE = 2 / 3
"""Minimum share of experts with rows, because the weights of all are read."""
_STEP = 4
"""Multiple of the number of places, so that few shapes occur: oneDNN generates code for every new shape."""
_TILE = 32
"""Multiple of D and of F: oneDNN reads the left factor in pieces of so many elements."""


def serves(c: ExpertsCall) -> bool:
    """Whether `forward` may compute a call, and is likely to be faster than the other backends."""
    experts, ids_TK = c.experts, c.ids_TK
    if ids_TK is None or not c.is_direct:
        return False
    if "weight_first" not in FORMATS[experts.format].backends:
        return False
    w_in, w_out = experts.w_in[0], experts.w_out[0]
    return (
        # first, because a compiler would guard on the sizes below
        runs_plainly(c.x_TD, c.weights_TK, w_in, w_out)
        and has_tiles()
        and c.x_TD.dtype == w_in.dtype == w_out.dtype == torch.bfloat16
        and not experts.b_in
        and experts.b_out is None
        and CHOICES[0] * len(w_in) <= ids_TK.numel() <= CHOICES[1] * len(w_in)
        and w_in.numel() >= FEWEST_WEIGHTS
        and c.x_TD.shape[-1] == w_in.shape[3]
        and w_in.shape[2] % _TILE == w_in.shape[3] % _TILE == 0
        and w_in.is_contiguous()
        and w_out.is_contiguous()
        and not torch.is_autocast_enabled("cpu")
    )


def has_tiles() -> bool:
    """Whether products of BF16 matrices run on AMX's tiles."""
    return torch.cpu._is_amx_tile_supported() and torch.backends.mkldnn.is_available()


def forward(c: ExpertsCall, _: list[Tensor]) -> Tensor | None:
    """Compute y (T, D) of a call that `serves` accepts.

    Returns:
        y; None if an expert has many rows or many have none, so that a product for each expert is faster.

    Raises:
        ConfigError: an id is out of range.
    """
    assert c.ids_TK is not None
    w_in_EHD, w_out_EDF = c.experts.w_in[0].flatten(1, 2), c.experts.w_out[0]
    E, D, top_k = len(w_in_EHD), w_in_EHD.shape[2], c.ids_TK.shape[1]
    maps = route_metadata(c.ids_TK, E, backend=c.backend)
    counts_E = maps.offsets_E.diff()
    counts = counts_E.tolist()
    num_live, num_rows = sum(count > 0 for count in counts), sum(counts)
    if max(counts) > MOST_ROWS or num_live < _FEWEST_LIVE * E:
        return None
    M = -(-max(counts) // _STEP) * _STEP
    places_E = torch.arange(0, E * M, M, dtype=torch.int32, device="cpu")
    shifts_E = places_E - maps.offsets_E[:-1]
    # padding repeats rows
    row_P = torch.arange(E * M, dtype=torch.int32, device="cpu").view(E, M) - shifts_E[:, None]
    row_P = row_P.flatten().clamp_(max=num_rows - 1)
    place_R = torch.arange(num_rows, dtype=torch.int32, device="cpu")
    place_R += shifts_E.repeat_interleave(counts_E, output_size=num_rows)
    x_PD = c.x_TD.index_select(0, maps.token_of_row_N.index_select(0, row_P))
    s_R = c.weights_TK.flatten().index_select(0, maps.slot_of_row_N[:num_rows]).float()
    s_EM = s_R.index_select(0, row_P).view(E, 1, M)
    h_EHM = torch.bmm(w_in_EHD, x_PD.view(E, M, D).mT)
    a_EFM = activate_(h_EHM.float(), c.experts.activation).mul_(s_EM)
    y_EDM = torch.bmm(w_out_EDF, a_EFM.to(h_EHM.dtype))
    # the last row is a dead slot's; rows behind the last live one belong to such
    y_PD = y_EDM.new_zeros(E * M + 1, D)
    y_PD[:-1].view(E, M, D).copy_(y_EDM.mT)
    place_N = pad(place_R, (0, len(maps.row_of_slot_N) - num_rows), value=E * M)
    place_N = place_N.index_select(0, maps.row_of_slot_N)
    # an embedding bag sums each token's rows in FP32, in one pass
    starts_T = torch.arange(0, len(place_N), top_k, dtype=torch.int32, device="cpu")
    return embedding_bag(place_N, y_PD, starts_T, mode="sum")
