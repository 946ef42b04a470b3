"""A user's measurements are added to the fit; what a run costs as it is configured."""

from dataclasses import replace

import pytest

import expertmesh as em
from expertmesh.cli import machine
from expertmesh.cli import main as front
from expertmesh.cli.machine import cluster_toml, with_links, with_spread_steps
from expertmesh.config.cluster import Software
from expertmesh.costs.communication import Link, Network
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.costs.step_time import efficiency_of, step_seconds
from expertmesh.errors import ConfigError
from expertmesh.models.registry import recipe
from expertmesh.planner.configured import as_configured, configured_layout
from expertmesh.planner.fit import fit_with
from expertmesh.planner.own import own_points

ROW = """
[points.{name}]
model = "{model}"
cluster = "h100x8"
measured = {measured}
ep = 8
mbs = 2
gbs = 64
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "own.toml"
        path.write_text(text)
        return str(path)

    return write


def test_own_rows_move_the_constants_towards_them(written):
    usual = fit_with(())
    slow = own_points(written("".join(ROW.format(name=f"a{n}", model="qwen3-30b", measured=3000) for n in range(3))))
    found = fit_with(slow)

    def error(efficiency):
        times = [step_seconds(p.raw(), efficiency).total_s / p.measured_s for p in slow]
        return max(abs(time - 1) for time in times)

    assert found != usual
    assert error(found) < error(usual)


def test_own_rows_take_recipes_and_change_plans(written, capsys):
    path = written(ROW.format(name="mine", model="gpt-moe-1b", measured=1000).replace("ep = 8", "ep = 1"))
    assert own_points(path)[0].sizes.num_parameters == 986_258_688
    words = ["plan", "gpt-moe-1b", "--cluster", "h100x8", "--tokens-per-batch", "131072"]
    assert front.main(words) == 0
    usual = capsys.readouterr().out
    assert front.main([*words, "--measured", path]) == 0
    assert capsys.readouterr().out != usual


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no sections points.NAME"),
        ("[points.a]\n", "has no model"),
        (ROW.format(name="a", model="qwen3-30b", measured=-1), "must be a finite number above 0"),
        (ROW.format(name="a", model="qwen3-30b", measured="inf"), "measured inf: must be a finite"),
        (ROW.format(name="a", model="qwen3-30b", measured="true"), "measured True: must be"),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1).replace('"h100x8"', "8"),
            "points.a, cluster 8: must be text",
        ),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1) + 'precision = "half"\n',
            "precision half: must be one of bfloat16",
        ),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1) + "num_experts = 4\n",
            "points.a: config.json has num_experts_per_tok=8: must be from 1 to the 4",
        ),
        (ROW.format(name="a", model="qwen", measured=1), "no recipe, run or config.json"),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1) + "overlaps = 8\n",
            "did you mean overlap?",
        ),
        (ROW.format(name="a", model="qwen3-30b", measured=1) + 'unit = "miles"\n', "tflops"),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1).replace("gbs = 64", "gbs = 4"),
            "do not fit 8 devices",
        ),
        (
            ROW.format(name="a", model="qwen3-30b", measured=1).replace("mbs = 2", 'mbs = "b"'),
            "mbs b: must be a whole number above 0",
        ),
        ("[points\n", "is no TOML file"),
    ],
)
def test_a_wrong_row_is_one_line(written, text, said):
    with pytest.raises(ConfigError) as caught:
        own_points(written(text))
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_run_as_it_is_configured():
    config = recipe(
        "gpt-1.3b-moe128",
        {
            "train.micro_batch_size": 128,
            "parallel.route_degree": 8,
            "parallel.zero_stage": 2,
            "parallel.overlap_degree": 2,
        },
    )
    expected = RankLayout(
        64,
        route_degree=8,
        zero_stage=2,
        overlap_degree=2,
        checkpointing="full",
        micro_batch=2,
        accumulation=4,
    )
    assert configured_layout(config, 64) == expected
    assert configured_layout(config, 48) is None
    found = em.plan(config, cluster="h100x64")
    own = as_configured(config, found.problem)
    assert own.layout == expected
    assert "as configured: zero 2, route 8, overlap 2, checkpointing, 2 x 4" in found.text()


def test_a_cluster_file_is_read_as_it_was_written(written):
    cluster = find_cluster("a100-80x16").model_copy(update={"name": "mine"})
    assert find_cluster(written(cluster_toml(cluster))) == cluster
    network = Network(Link(3e-6, 1.5e11), Link(7e-6, 8e10))
    found = with_links(written(cluster_toml(cluster)), network, 8)
    assert (found.inside.gb_per_s, found.across.gb_per_s) == (150, 10)
    assert (found.inside.latency_s, found.across.latency_s) == (3e-6, 7e-6)


def test_measured_software_replaces_the_fitted(written):
    text = 'device = "h100"\nnum_gpus = 8\n[software]\nhost_s = 0.5\n'
    slow = em.plan("gpt-moe-1b", cluster=written(text))
    assert slow.best.problem.efficiency.host_s == 0.5
    assert slow.best.tokens_per_s < em.plan("gpt-moe-1b", cluster="h100x8").best.tokens_per_s


def test_what_a_layer_costs_the_host_is_that_of_spread_models():
    software = Software(dense=0.8, grouped=0.6, network=1, element_bytes=200, host_s=2e-3)
    cluster = find_cluster("cpux2").model_copy(update={"software": software})
    truth = replace(efficiency_of(cluster, machine.CPU_USUAL), host_s=0.018)
    rows = []
    for raw, (config, sequences, _) in machine.spread_models(cluster, 2):
        assert config.train.batch_size == 2 * sequences
        assert raw.gathers_s > 0, "weights are gathered from the other rank"
        rows.append((raw, step_seconds(raw, truth).total_s))
    assert len(rows) == len(machine.CALIBRATION)
    found = with_spread_steps(cluster, rows).software
    assert found.host_s == pytest.approx(0.018, rel=0.05)
    assert found.model_copy(update={"host_s": 2e-3}) == software
