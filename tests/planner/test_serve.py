"""Generation: bytes that a step reads, and what grows with what."""

from dataclasses import replace

import pytest

from expertmesh.cli import main as front
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.step_time import HBM
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import recipe
from expertmesh.planner.published import published_models
from expertmesh.planner.serve import Serving, serve_plan

QWEN = Serving(published_models()["qwen3-30b"], find_cluster("h100x8"), 64, 4096, 1, 8)


def test_one_token_reads_its_active_weights_once():
    alone = replace(QWEN, cluster=find_cluster("h100x1"), batch=1, context=1, route_degree=1)
    sizes = alone.sizes
    read = 2 * (
        sizes.active_parameters - sizes.dim * sizes.vocab_size
    )  # the embedding is looked up
    expected = read / (HBM * alone.cluster.device.hbm_bytes_per_s)
    assert alone.seconds.weights_s == pytest.approx(expected, rel=2e-2)
    assert alone.seconds.exchange_s == alone.seconds.tensor_s == 0


def test_experts_touched_are_those_of_distinct_choices():
    block = QWEN.sizes.blocks[0]
    one = replace(QWEN, batch=1, cluster=find_cluster("h100x1"), route_degree=1)
    assert one.experts_touched(block) == pytest.approx(block.rows_per_token)
    many = replace(QWEN, batch=100_000)
    assert many.experts_touched(block) == pytest.approx(block.num_experts / 8)


def test_one_sequence_chooses_the_experts_of_one_token():
    for way in serve_plan("deepseek-v3", cluster="h200x32", batch=1, context=4096).ways:
        for block in way.sizes.blocks:
            touched = way.experts_touched(block) * way.route_degree
            assert touched == pytest.approx(block.rows_per_token)


def test_keys_and_values_are_counted_once_for_each_head():
    """Grouped heads are shared out over tensor-parallel devices as far as there are some; latents are on each of them."""
    per_token = 48 * 2 * 4 * 128 * 2
    assert QWEN.cache_held_bytes == 8 * 4096 * per_token
    for tp, part in ((2, 2), (4, 4), (8, 4)):
        assert replace(QWEN, tp_degree=tp).cache_held_bytes == 8 * tp * 4096 * per_token / part
    latent = replace(QWEN, sizes=published_models()["deepseek-v3"], tp_degree=4)
    assert latent.cache_held_bytes == 8 * 4 * 4096 * 61 * (512 + 64) * 2


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"context": 8192}, "cache_s"),
        ({"batch": 512}, "weights_s"),
        ({"batch": 60_000}, "products_s"),
        ({"tp_degree": 8}, "tensor_s"),
        ({"weight_bytes": 4.0}, "weights_s"),
    ],
)
def test_what_costs_more_where(change, part):
    assert getattr(replace(QWEN, **change).seconds, part) > getattr(QWEN.seconds, part)


def test_graphs_save_launches_alone():
    fused = replace(QWEN, fused=True).seconds
    assert fused.host_s < QWEN.seconds.host_s
    assert replace(fused, host_s=QWEN.seconds.host_s) == QWEN.seconds


def test_ways_fit_and_the_fastest_is_first():
    found = serve_plan("gpt-1.3b-moe128", cluster="a100-40x32", batch=128, context=1024)
    times = [way.seconds.total_s for way in found.ways]
    assert times == sorted(times)
    assert all(way.fits for way in found.ways)
    assert found.best.sizes == sizes_of(recipe("gpt-1.3b-moe128").model)
    low, high = found.best.usd_per_million
    assert 0 < low < high


def test_the_table_has_every_part(capsys):
    words = [
        "plan",
        "qwen3-30b",
        "--cluster",
        "h100x8",
        "--serve",
        "--batch",
        "64",
        "--context",
        "4096",
    ]
    assert front.main(words) == 0
    text = capsys.readouterr().out
    for part in (
        "per token",
        "throughput",
        "USD per million",
        "keys and values",
        "ways:",
        "guessed:",
    ):
        assert part in text


WRONG = [
    (["--serve", "--batch", "8"], "--context: must be given"),
    (["--serve", "--context", "8"], "--batch: must be given"),
    (["--serve", "--batch", "0", "--context", "8"], "--batch 0: must be a whole number from 1"),
    (["--batch", "8"], "--batch 8: is an option of inference"),
    (
        ["--serve", "--pp", "2", "--batch", "8", "--context", "8"],
        "--pp 2: is an option of training",
    ),
    (
        ["--serve", "--imbalance", "1", "--batch", "8", "--context", "8"],
        "--imbalance 1.0: is an option",
    ),
    (
        ["--serve", "--page", "x.html", "--batch", "8", "--context", "8"],
        "--page x.html: is an option of training",
    ),
    (["--serve", "--batch", "100000", "--context", "100000"], "for keys and values"),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(w) for w, _ in WRONG])
def test_a_mistake_is_one_line(words, said, capsys):
    assert front.main(["plan", "qwen3-30b", "--cluster", "h100x8", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "change", [{"batch": "8"}, {"batch": True}, {"context": 8.0}, {"context": 2**40}, {"fused": 1}]
)
def test_an_argument_of_a_wrong_type_or_size_is_one_line(change):
    given = {"cluster": "h100x8", "batch": 8, "context": 128} | change
    ((name, value),) = change.items()
    with pytest.raises(ConfigError) as caught:
        serve_plan("qwen3-30b", **given)
    assert str(caught.value).startswith(f"{name}={value!r}: must be ")
