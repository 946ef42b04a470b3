"""batch_invariant with backend="triton": tiles that do not follow the number of rows, the same bits in every batch."""

import pytest
import torch
from tests.oracle.numerics import assert_two_times, sums_of_product
from tests.support.launches import as_on

from expertmesh import MoELayer
from expertmesh.kernels import tiles
from expertmesh.ops.invariant import operators as invariant

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's products are NumPy's, whose rows may differ by their place in a tile, so there a row keeps its
# place.
PARTS = [slice(0, 1), slice(0, 20)] + ([slice(30, 37), slice(5, 36)] if DEVICE == "cuda" else [])
SHAPE = {"num_experts": 8, "dim": 512, "hidden_dim": 1024, "num_branches": 2}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_do_not_follow_the_number_of_rows(arch, dtype):
    device = torch.device("cuda")
    with as_on(arch):
        configs = [
            [
                tiles.choose_config(device, dtype, num_rows=rows, batch_invariant=fixed, **SHAPE)
                for rows in (8, 300, 100_000)
            ]
            for fixed in (True, False)
        ]
    assert configs[0][0] == configs[0][1] == configs[0][2]
    assert len({config.block_m for config in configs[1]}) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(dtype, bias):
    x = torch.randn(37, 19, device=DEVICE).to(dtype)
    w = torch.randn(21, 19, device=DEVICE).to(dtype)
    b = torch.randn(21, device=DEVICE).to(dtype) if bias else None
    whole = invariant.linear(x, w, b, backend="triton")
    for rows in PARTS:
        assert torch.equal(invariant.linear(x[rows], w, b, backend="triton"), whole[rows])
    assert invariant.linear(x[:0], w, b, backend="triton").shape == (0, 21)
    exact = [None if t is None else t.double() for t in (x, w, b)]
    plain = torch.nn.functional.linear(x, w, b)
    sums = sums_of_product(x, w.T, plus=0.0 if b is None else b)
    assert_two_times(whole, plain, torch.nn.functional.linear(*exact), what="linear", sums=sums)


@pytest.mark.parametrize("options", [{"bias": True}, {"num_shared_experts": 1, "activation": "geglu"}])
def test_layer(options):
    layer = MoELayer(
        dim=18, hidden_dim=20, num_experts=4, top_k=2, seed=0, backend="triton", batch_invariant=True,
        device=DEVICE, **options,
    ).eval()  # fmt: skip
    x = torch.randn(37, 18, device=DEVICE)
    with torch.no_grad():
        whole, stats = layer(x)
        for rows in PARTS:
            y, found = layer(x[rows])
            assert torch.equal(y, whole[rows])
            assert torch.equal(found.topk_weights_TK, stats.topk_weights_TK[rows])


def test_fp64_takes_blocks():
    x, w = torch.randn(3, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    found = [invariant.linear(x, w, backend=name) for name in ("triton", "torch")]
    assert torch.equal(*found)
