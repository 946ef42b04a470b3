"""Every kernel that a training step of the experts launches, for a GPU and a shape, ready to be compiled."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from expertmesh.kernels import (
    combine,
    moe_backward,
    moe_forward,
    moe_wgrad,
    route_metadata,
    split_product,
    split_rows,
    tile_tables,
    tiles,
)
from expertmesh.ops.activation import num_branches
from expertmesh.ops.experts import triton_backend as moe_mlp_triton
from expertmesh.ops.experts.weights import ExpertSlice, Needs
from expertmesh.ops.route_metadata import RouteMetadata
from tests.support.launches import Launch, as_on, recorded_launches

GEMMS = ("up", "rows", "hidden_grad", "rows_transposed")
"""The kernels in which the time goes."""


GPU_SHAPES = (
    (4096, 1024, 768, 64, 8),
    (1000, 520, 328, 61, 2),
    (128, 129, 65, 7, 2),
    (4, 512, 256, 64, 8),
    (1, 64, 64, 8, 8),
    (0, 64, 64, 8, 2),
)
"""T, D, F, E, K of the tests on a GPU: aligned, with tails in every tile, odd, decoding, a single token, none."""
GPU_HOT_SHAPE = (2048, 512, 256, 64, 2)
"""In the place of the first where one expert has all rows."""
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gpu_options(number: int) -> dict[str, Any]:
    """Bias, branches and activation of the test of a shape."""
    return {
        "bias": number % 2 == 1,
        "interleaved": number % 3 == 0,
        "activation": "geglu" if number == 1 else "swiglu",
    }


def gpu_launches(target: str) -> list[Launch]:
    """List what the test of these shapes launches, each build once."""
    numbered = [*enumerate(GPU_SHAPES), (0, GPU_HOT_SHAPE)]
    found = {
        launch.key: launch
        for dtype in GPU_DTYPES
        for number, shape in numbered
        if shape[0]
        for launch in step_launches(target, dtype, shape=shape, **gpu_options(number))
    }
    return list(found.values())


def step_launches(
    target: str,
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int, int, int] = (4096, 2048, 768, 64, 8),
    activation: str = "swiglu",
    bias: bool = False,
    interleaved: bool = False,
    precision: str = "ieee",
    recompute_h: bool = False,
    accumulate: bool = False,
    table: str = tile_tables.DEFAULT,
) -> list[Launch]:
    """List what forward and backward launch.

    Args:
        target: a key of `testing.aot.TARGETS`.
        dtype: of x and the weights.
        shape: (T, D, F, E, K).
        activation: its name.
        bias: with b_in and b_out.
        interleaved: gate and up alternate in w_in.
        precision: of FP32 products.
        recompute_h: the forward saves no H.
        accumulate: weight gradients are added to FP32 buffers.
        table: of tiles.
    """
    T, D, F, E, K = shape
    G = num_branches(activation)

    def empty(*size: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def index(size: int) -> Tensor:
        return empty(size, dtype=torch.int32)

    def config(device: torch.device, dtype: torch.dtype, **sizes: int) -> tiles.LaunchConfig:
        rows_per_expert = sizes.pop("num_rows") / sizes.pop("num_experts")
        return tiles.config_for(
            target,
            dtype,
            rows_per_expert=rows_per_expert,
            precision=precision,
            dim=sizes["dim"],
            hidden_dim=sizes["hidden_dim"],
            num_branches=sizes["num_branches"],
            table=table,
        )

    w_in = empty(E, F, G, D).transpose(1, 2) if interleaved else empty(E, G, F, D)
    b_in, b_out = (empty(E, G, F), empty(E, D)) if bias else (None, None)
    experts = ExpertSlice(w_in, empty(E, D, F), b_in, b_out, activation)
    maps = RouteMetadata(index(E + 1), index(T * K), index(T * K), index(T * K))
    x, weights = empty(T, D), empty(T, K, dtype=torch.float32)
    needs = Needs(True, True, True, True, bias, bias)
    modules = (combine, moe_backward, moe_forward, moe_wgrad, split_rows, route_metadata)
    with mock.patch.object(tiles, "choose_config", config), recorded_launches(*modules) as launches:
        y, h = moe_mlp_triton.forward(x, experts, weights, maps, save_h=not recompute_h)
        shared = (experts, weights, maps, needs)
        _, _, hidden = moe_mlp_triton.data_grads(y, x, h, *shared)
        into = _fp32(experts) if accumulate else None
        moe_mlp_triton.weight_grads(y, x, hidden, *shared, into=into)
    return launches


def _fp32(experts: ExpertSlice) -> ExpertSlice:
    def wide(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty_like(tensor, dtype=torch.float32)

    return ExpertSlice(
        torch.empty_like(experts.w_in_EGFD, dtype=torch.float32),
        torch.empty_like(experts.w_out_EDF, dtype=torch.float32),
        wide(experts.b_in_EGF),
        wide(experts.b_out_ED),
        experts.activation,
    )


def router_launches(
    target: str, shape: tuple[int, int, int] = (8192, 2048, 128), *, num_programs: int = 132
) -> list[Launch]:
    """List what the router's product by BF16 parts launches, forward and backward, for a shape (T, D, E)."""
    T, D, E = shape
    x = torch.empty(T, D, dtype=torch.bfloat16, device="meta")
    w, grad = torch.empty(E, D, device="meta"), torch.empty(T, E, device="meta")
    on = as_on(target, num_multiprocessors=num_programs)
    with on, recorded_launches(split_product) as launches:
        split_product.logits(x, w)
        split_product.gradients(grad, x, w, need_x=True, need_w=True)
    return launches
