"""Frozen experts in any format, with and without adapters, by Triton: gradients, a row's bits, no waits."""

from functools import partial

import pytest
import torch
from tests.moe.test_quantized_base import D, E, F, adapter_grads, experts_of, layer_of, run, widened
from tests.oracle.numerics import assert_two_times
from tests.support.adapters import of_runs
from tests.support.launches import as_on, recorded_launches
from tests.support.waits import waits

from expertmesh import lora
from expertmesh.kernels import (
    activated_rows,
    combine,
    moe_backward,
    moe_forward,
    permute,
    quantized_products,
)
from expertmesh.kernels import (
    route_metadata as route_kernels,
)
from expertmesh.ops.experts import quantized_triton
from expertmesh.ops.experts.call import ExpertsCall, LowRank, TokenAdapters
from expertmesh.ops.experts.moe_mlp import compute

BF16 = torch.bfloat16
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products are NumPy's, whose rows may differ by their place in a tile, so there a row keeps its
# place.
PARTS = [slice(0, 1), slice(0, 11)] + ([slice(3, 4), slice(7, 20)] if DEVICE == "cuda" else [])


@pytest.mark.parametrize(
    ("form", "options"),
    [("int4", {}), ("mxfp4", {"activation": "relu2", "bias": False}), ("nf4", {"bias": False})],
)
def test_gradients_of_tokens_are_those_of_the_widened_weights(form, options):
    made = experts_of(form, BF16, backend="triton", **options).to(DEVICE)
    wide = widened(made, torch.float64).double()
    wide.backend = "auto"
    found, plain, exact = run(made, BF16), run(widened(made), BF16), run(wide, torch.float64)
    for name, value in found.items():
        assert_two_times(value, plain[name], exact[name], what=f"{form} {name}")


def test_some_experts_are_widened_at_a_time():
    """Products in parts have the bits of one product, where experts without rows begin and end a part, too."""
    made = experts_of("int4", BF16).to(DEVICE)
    one, offsets_E = made.weights().slices()[0], torch.tensor([0, 0, 7, 20, 20, 31], dtype=torch.int32, device=DEVICE)
    x_RD, b_EH = torch.randn(35, D).to(DEVICE, BF16), made.b_in.flatten(1)
    how = {"is_in": True, "batch_invariant": True}
    whole = quantized_triton.linear(x_RD, one, offsets_E, b_EH, **how)
    assert torch.equal(quantized_triton.linear(x_RD, one, offsets_E, b_EH, **how, widened_bytes=1), whole)
    assert whole[:31].any() and not whole[31:].any()


@pytest.mark.parametrize(("form", "shared"), [("int4", False), ("fp8", True)])
def test_adapters_on_a_quantised_base_are_those_on_its_widened_weights(form, shared):
    layers = [layer_of(form, dtype=BF16, backend=name).to(DEVICE) for name in ("triton", "torch", "torch")]
    for layer in layers:
        lora.add(layer, rank=4, seed=1, shared=shared, dtype=BF16)
    for layer, to in zip(layers[1:], (BF16, torch.float64), strict=True):
        layer.experts.convert("dense", dtype=to)
        layer.experts.requires_grad_(False).adapters.requires_grad_(True).to(to)
    found, plain, exact = (
        adapter_grads(layer, to) for layer, to in zip(layers, (BF16, BF16, torch.float64), strict=True)
    )
    assert found.keys() == plain.keys() and len(found) == 7
    for name, value in found.items():
        assert_two_times(value, plain[name], exact[name], what=f"{form} {name}")


@pytest.mark.parametrize(("form", "shared"), [("dense", False), ("int4", False), ("mxfp4", True)])
def test_a_row_keeps_its_bits_and_has_them_in_training(form, shared):
    layer = layer_of(form, dtype=BF16, backend="triton", batch_invariant=True).to(DEVICE)
    lora.add(layer, rank=3, seed=1, shared=shared, dtype=BF16)
    for one in lora.adapters(layer).values():
        torch.nn.init.normal_(one.b, std=0.1)
    x_TD = torch.randn(20, D).to(DEVICE, BF16)
    with torch.no_grad():
        whole = layer(x_TD)[0]
        for part in PARTS:
            assert torch.equal(layer(x_TD[part])[0], whole[part])
    x_TD.requires_grad_()
    y_TD = layer(x_TD)[0]
    assert torch.equal(y_TD, whole)
    y_TD.float().sum().backward()
    layer.batch_invariant = False
    ordinary = layer(x_TD)[0]
    torch.testing.assert_close(y_TD, ordinary, atol=0.02, rtol=0.02)
    assert all(one.a.grad.any() and one.b.grad.any() for one in lora.adapters(layer).values()) and x_TD.grad.any()


def low_rank(seed, *sizes):
    generator = torch.Generator().manual_seed(seed)
    a, b = (0.2 * torch.randn(E, *size, generator=generator) for size in sizes)
    return LowRank(a.to(DEVICE, BF16), b.to(DEVICE, BF16), 1.0, False)


@pytest.mark.parametrize("form", ["dense", "int4"])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_tokens_with_adapters_of_their_own(form, is_invariant):
    made = experts_of(form, BF16, bias=False).requires_grad_(False).to(DEVICE)
    generator = torch.Generator().manual_seed(2)
    x_TD, ids_TK = torch.randn(12, D, generator=generator).to(BF16), torch.randint(0, E, (12, 2), generator=generator)
    given = (t.to(DEVICE) for t in (x_TD, torch.rand(12, 2, generator=generator), ids_TK))
    x_TD, s_TK, ids_TK = given
    call = ExpertsCall(x_TD, s_TK, made.weights(), "triton", ids_TK, batch_invariant=is_invariant)
    one, two = ((low_rank(seed, (3, D), (2 * F, 3)), low_rank(seed, (3, F), (D, 3))) for seed in (1, 2))
    with torch.no_grad():
        own = of_runs(12, [(0, 4, *one), (7, 12, *two)])
        own = own._replace(slot_T=own.slot_T.to(DEVICE), tokens_n=own.tokens_n.to(DEVICE))
        found = compute(call._replace(of_tokens=own))
        for own, rows in ((one, slice(0, 4)), (None, slice(4, 7)), (two, slice(7, 12))):
            alone = compute(call._replace(adapters=own))
            assert torch.equal(found[rows], alone[rows]) or not is_invariant
            torch.testing.assert_close(found[rows], alone[rows], atol=0.1, rtol=0.05)


@pytest.mark.parametrize("num_tokens", [9, 1000])
@pytest.mark.parametrize("is_invariant", [False, True])
def test_nothing_waits_for_the_gpu(num_tokens, is_invariant):
    """In answers of few tokens and of many, with adapters and without, and in the products of training."""
    made = experts_of("int4", BF16).to("meta")
    on_in, on_out = (
        one._replace(a_ErK=one.a_ErK.to("meta"), b_ENr=one.b_ENr.to("meta"))
        for one in (low_rank(1, (3, D), (2 * F, 3)), low_rank(2, (3, F), (D, 3)))
    )
    empty = partial(torch.empty, device="meta")
    x_TD, own_T = empty(num_tokens, D, dtype=BF16), empty(num_tokens, dtype=torch.int64)
    call = ExpertsCall(x_TD, empty(num_tokens, 2), made.weights(), "triton", empty(num_tokens, 2, dtype=torch.int64))
    call = call._replace(batch_invariant=is_invariant)
    one, offsets_E = call.experts.slices()[0], empty(E + 1, dtype=torch.int32)
    modules = (combine, moe_backward, moe_forward, permute, quantized_products, route_kernels, activated_rows)
    with as_on("sm_90"), recorded_launches(*modules) as launches, waits() as watch, torch.no_grad():
        compute(call)
        compute(call._replace(of_tokens=TokenAdapters(own_T, own_T, on_in, on_out)))
        compute(call._replace(adapters=(on_in, on_out)))
        h_RH = quantized_triton.linear(x_TD, one, offsets_E, None, is_in=True, batch_invariant=is_invariant)
        d_x = quantized_triton.linear(h_RH, one, offsets_E, None, is_in=True, transposed=True)
        assert (h_RH.shape, d_x.shape) == ((num_tokens, 2 * F), x_TD.shape)
    assert watch.found == []
    assert {"quantized_product", "widen", "rows"} - {launch.name for launch in launches} <= {"quantized_product"}
