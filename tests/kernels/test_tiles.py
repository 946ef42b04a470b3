"""The tile table: what a multiprocessor can hold, and when weights are read through descriptors."""

import pytest
import torch
from tests.support.experts_builds import step_launches

from expertmesh.errors import ConfigError
from expertmesh.kernels import tile_tables, tiles

WIDTHS = [(2048, 768), (4096, 14_336), (4096, 512), (2048, 1024), (7168, 2048), (2048, 2048)]
ROWS = (1, 8, 24, 48, 100, 256, 2048, 32_768)


@pytest.mark.parametrize(
    ("arch", "table"),
    [
        ("sm_80", "default"),
        ("sm_100", "default"),
        *(("sm_90", name) for name in tile_tables.names("sm_90")),
    ],
)
@pytest.mark.parametrize("branches", [1, 2])
def test_the_programs_of_a_tile_fit_a_multiprocessor_together(arch, table, branches):
    for (dim, hidden_dim), rows in ((w, r) for w in WIDTHS for r in ROWS):
        config = tiles.config_for(
            arch,
            torch.bfloat16,
            rows_per_expert=rows,
            dim=dim,
            hidden_dim=hidden_dim,
            num_branches=branches,
            table=table,
        )
        assert len({getattr(config, name).block_m for name in tile_tables.OVER_ROWS}) == 1
        for name in tile_tables.GEMMS:
            tile = getattr(config, name)
            needed = tiles.shared_bytes(name, tile, 2, branches, tma=config.tma)
            if arch == "sm_80" and name in tile_tables.OVER_ROWS and tile.block_m >= 64:
                # the estimate is Hopper's; products of warps need one buffer less
                needed = needed * (tile.num_stages - 1) // tile.num_stages
            assert tile.programs * needed <= tiles.SHARED_BYTES[arch], (name, rows, tile)
            # the accumulator alone, FP32, spread over the threads; a thread has 255 registers
            threads = 32 * tile.num_warps
            columns = tile.block_n * (branches if name == "up" else 1)
            assert tile.block_m * columns / threads <= 128, (name, rows, tile)
            assert tile.programs * threads <= 2048


def test_a_flag_selects_a_table(monkeypatch):
    def config(table):
        monkeypatch.setenv(tile_tables.FLAG, table)
        return tiles.config_for(
            "sm_90", torch.bfloat16, rows_per_expert=512, dim=2048, hidden_dim=768, num_branches=2, table=tile_tables.selected(),  # noqa: E501
        )  # fmt: skip

    default = config("")
    assert default == config("default")
    assert (default.up.programs, config("two-programs").up.programs) == (1, 2)
    assert config("group-4").w_in_grad.group_m == 4
    with pytest.raises(ConfigError, match="EXPERTMESH_TILES=tow: sm_90 has no such table"):
        config("tow")
    sizes = {"num_rows": 64, "num_experts": 4, "dim": 32, "hidden_dim": 48, "num_branches": 2}
    monkeypatch.setenv(tile_tables.FLAG, "group-16")
    assert tiles.choose_config(torch.device("cpu"), torch.float32, **sizes).up.group_m == 16


def test_descriptors_need_weights_that_begin_at_16_bytes():
    config = tiles.config_for("sm_90", torch.bfloat16, rows_per_expert=512, dim=64, hidden_dim=64, num_branches=2)
    flat = torch.empty(65, dtype=torch.bfloat16)
    assert config.tma
    assert tiles.described(config, flat[8:], flat).tma
    assert not tiles.described(config, flat, flat[1:]).tma
    wide = torch.empty(8, 9, dtype=torch.bfloat16)
    assert wide[:1, :8].is_contiguous()
    assert not tiles.described(config, wide[:1, :8]).tma


def test_a_plan_is_chosen_once():
    sizes = {"rows_per_expert": 512, "dim": 64, "hidden_dim": 64, "num_branches": 2}
    first, again = (tiles.config_for("sm_90", torch.bfloat16, **sizes) for _ in range(2))
    assert first.up is again.up


def test_shards_at_odd_places_take_the_path_with_pointers(monkeypatch):
    def names_with_descriptors(offset):
        monkeypatch.setattr(
            "tests.support.experts_builds.torch.empty",
            lambda *size, **options: _behind(offset, *size, **options),
        )
        return {launch.name for launch in step_launches("sm_90", torch.bfloat16) if launch.values.get("TMA")}

    empty = torch.empty

    def _behind(offset, *size, **options):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        count = torch.Size(shape).numel()
        return empty(count + offset, **options)[offset:].view(shape)

    assert names_with_descriptors(0) == {"up", "rows", "hidden_grad", "rows_transposed"}
    assert names_with_descriptors(4) == set()
