"""The tile table: what a multiprocessor can hold, and when weights are read through descriptors."""

import pytest
import torch
from tests.support.experts_builds import step_launches

from expertmesh.kernels import tiles

WIDTHS = [(2048, 768), (4096, 14_336), (4096, 512), (2048, 1024), (7168, 2048), (2048, 2048)]
ROWS = (1, 8, 24, 48, 100, 256, 2048, 32_768)
GEMMS = ("up", "down", "hidden_grad", "input_grad", "w_in_grad", "w_out_grad")


def num_buffers(arch, name, tile):
    """Copies of a step's operands that Triton keeps, as the builds show."""
    if name.startswith("w_"):  # rows loaded by loaded indices: one buffer per two stages
        return (tile.num_stages + 1) // 2
    # the warp-group products read shared memory while the next copies arrive, which takes one more
    return tile.num_stages if arch != "sm_80" and tile.block_m >= 64 else tile.num_stages - 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("branches", [1, 2])
def test_the_programs_of_a_tile_fit_a_multiprocessor_together(arch, branches):
    for (dim, hidden_dim), rows in ((w, r) for w in WIDTHS for r in ROWS):
        plan = tiles.plan_for(
            arch,
            torch.bfloat16,
            rows_per_expert=rows,
            dim=dim,
            hidden_dim=hidden_dim,
            num_branches=branches,
        )
        for name in GEMMS:
            tile = getattr(plan, name)
            columns = tile.block_n * (branches if name == "up" else 1)
            step = (tile.block_m + columns) * tile.block_k * 2
            buffers = num_buffers(arch, name, tile)
            assert tile.programs * step * buffers <= tiles.SHARED_BYTES[arch], (name, rows, tile)
            # the accumulator alone, FP32, spread over the threads; a thread has 255 registers
            threads = 32 * tile.num_warps
            assert tile.block_m * columns / threads <= 128, (name, rows, tile)
            assert tile.programs * threads <= 2048


def test_descriptors_need_weights_that_begin_at_16_bytes():
    plan = tiles.plan_for(
        "sm_90", torch.bfloat16, rows_per_expert=512, dim=64, hidden_dim=64, num_branches=2
    )
    flat = torch.empty(65, dtype=torch.bfloat16)
    assert plan.tma
    assert tiles.described(plan, flat[8:], flat).tma
    assert not tiles.described(plan, flat, flat[1:]).tma


def test_shards_at_odd_places_take_the_path_with_pointers(monkeypatch):
    def names_with_descriptors(offset):
        monkeypatch.setattr(
            "tests.support.experts_builds.torch.empty",
            lambda *size, **options: _behind(offset, *size, **options),
        )
        return {
            launch.name
            for launch in step_launches("sm_90", torch.bfloat16)
            if launch.values.get("TMA")
        }

    empty = torch.empty

    def _behind(offset, *size, **options):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        count = torch.Size(shape).numel()
        return empty(count + offset, **options)[offset:].view(shape)

    assert names_with_descriptors(0) == {"up", "rows", "hidden_grad", "rows_transposed"}
    assert names_with_descriptors(4) == set()
