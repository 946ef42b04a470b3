"""The product that widens 8 and 4 bits on the way: interpreted against widened matrices, and built for every target."""

from functools import partial

import pytest
import torch
from tests.ops.quantized.test_quantized_experts import assert_computes, call, experts
from tests.support.aot import TARGETS
from tests.support.launches import recorded_launches

from expertmesh.kernels import quantized_products
from expertmesh.ops.experts import quantized_triton
from expertmesh.ops.experts.checked_arguments import checked
from expertmesh.ops.experts.weights import FORMATS
from expertmesh.ops.quantized.rounding import Rounded, widened
from expertmesh.ops.route_metadata import route_metadata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMS = list(quantized_products.FORMATS)


@pytest.mark.parametrize(
    ("form", "dtype"), [(f, torch.bfloat16) for f in FORMS] + [(f, torch.float32) for f in FORMS[1:4]]
)
@pytest.mark.parametrize(
    ("sizes", "num_tokens"),
    [({}, 7), ({"dim": 160, "hidden_dim": 96, "bias": True}, 3), ({"activation": "relu2"}, 40), ({}, 200)],
)
def test_interpreted(form, dtype, sizes, num_tokens):
    made = experts(form, dtype=dtype, **sizes).to(DEVICE)
    c = call(made, num_tokens, dtype=dtype, backend="triton")
    maps = route_metadata(c.ids_TK, made.num_experts)
    assert quantized_triton.serves(checked(c, maps)) == (num_tokens < 200)
    assert_computes(made, c)


@pytest.mark.parametrize("form", FORMS)
def test_matrices_are_widened_to_the_bit(form):
    for kind in (torch.bfloat16, torch.float32):
        one = experts(form, dim=160, hidden_dim=96, dtype=kind).to(DEVICE).weights().slices()[0]
        for dtype in (torch.bfloat16, torch.float32):
            for is_in, wide in ((True, one.w_in), (False, one.w_out)):
                expected = torch.stack([wide(e, dtype) for e in range(one.shape[0])])
                assert torch.equal(quantized_triton.widened(one, dtype, is_in=is_in), expected)


def test_every_byte_of_fp8_is_widened_as_torch_does():
    """All 256 of them, through a product with ones."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = torch.where(numbers.float().isfinite(), numbers.float(), 0.0)
    w_ENK = torch.zeros(1, 256, 32).to(torch.float8_e4m3fn)
    w_ENK[0, :, 5] = numbers.to(torch.float8_e4m3fn)
    x_TK = torch.zeros(1, 32)
    x_TK[0, 5] = 1
    maps = route_metadata(torch.zeros(1, 1, dtype=torch.int64), 1)
    block = quantized_products.block_of("fp8", 32, 1, 1)
    order = (maps.offsets_E, maps.token_of_row_N, maps.slot_of_row_N)
    out = quantized_products.grouped_product(
        x_TK,
        w_ENK,
        torch.ones(1, 1, 2, 1),
        quantized_products.Rows.cut(*order, block["BLOCK_M"]),
        format="fp8",
        gather=True,
        rows_per_branch=256,
        block=block,
    )
    assert torch.equal(out[0], widened(Rounded(w_ENK[0], torch.ones(2, 1)))[:, 5])


def launches_of(form):
    """Launches of one product of 64 tokens with 128 experts of 1,536 by 2,048, biases included, and of their
    widening."""
    E, N, K, R = 128, 1536, 2048, 512
    empty = partial(torch.empty, device="meta")
    whole = partial(empty, dtype=torch.int32)
    x, weights_R = empty(R, K, dtype=torch.bfloat16), empty(R)
    kept = FORMATS[form].kept((E, N, K), torch.bfloat16).items()
    w_ENK, scales = (empty(size, dtype=dtype) for _, (size, dtype) in kept)
    block = quantized_products.block_of(form, K, scales.shape[-1], R // E)
    rows = quantized_products.Rows(whole(E + 1), whole(R), whole(R), whole(R), whole(R), whole(1))
    how = {"format": form, "rows_per_branch": N // 2}
    with recorded_launches(quantized_products) as launches:
        more = {"gather": True, "block": block, "bias_EN": x[:E, :N].contiguous(), "weights_R": weights_R}
        quantized_products.grouped_product(x, w_ENK, scales, rows, **how, **more)
        quantized_products.widen(w_ENK, scales, **how, dtype=torch.bfloat16)
    return launches


@pytest.mark.parametrize(
    ("target", "form"), [(t, f) for t in TARGETS for f in FORMS if t in ("sm_90", "gfx942") or f in ("int4", "mxfp4")]
)
def test_built(target, form):
    product, widening = launches_of(form)
    made = product.build(target)
    assert made.spill_bytes == 0
    assert ("mma" in made.assembly) or ("mfma" in made.assembly)
    assert widening.build(target).spill_bytes == 0
