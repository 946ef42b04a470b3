"""The product that widens 8 and 4 bits on the way: interpreted against widened matrices, and built for every target."""

import pytest
import torch
from tests.ops.quantized.test_quantized_experts import assert_computes, call, experts
from tests.support.aot import TARGETS, build

from expertmesh.kernels import quantized_products
from expertmesh.ops.experts import quantized_triton
from expertmesh.ops.experts.checked_arguments import checked
from expertmesh.ops.quantized.rounding import Rounded, widened
from expertmesh.ops.route_metadata import route_metadata

FORMS = ("int8", "int4", "fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("sizes", "num_tokens"),
    [({}, 7), ({"dim": 160, "hidden_dim": 96}, 3), ({"activation": "relu2"}, 40)],
)
def test_interpreted(form, dtype, sizes, num_tokens):
    made = experts(form, dtype=dtype, **sizes)
    c = call(made, num_tokens, dtype=dtype, backend="triton")
    maps = route_metadata(c.ids_TK, made.num_experts)
    assert quantized_triton.serves(checked(c, maps))
    assert_computes(made, c)


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("target", list(TARGETS))
def test_built(target, form):
    options = quantized_products.block_of(form, 2048, {"int8": 1, "int4": 32, "fp8": 16}[form], 64)
    warps = options.pop("num_warps")
    numbers = dict.fromkeys(("num_rows", "N", "K", "F", "num_groups"), "i32")
    places = ("token_of_row", "offsets", "tile_expert", "tile_row", "num_tiles")
    types = {f"{name}_ptr": "*i32" for name in places} | numbers
    types |= {"x_ptr": "*bf16", "scales_ptr": "*bf16", "out_ptr": "*fp32"}
    types["w_ptr"] = "*i8" if form == "int8" else "*u8"
    constants = {
        "FORMAT": quantized_products.FORMATS[form],
        "GATHER": True,
        "PRECISION": "tf32",
        **options,
    }
    made = build(quantized_products._quantized_product, target, types, constants, num_warps=warps)
    assert made.spill_bytes == 0
    assert ("mma" in made.assembly) or ("mfma" in made.assembly)
