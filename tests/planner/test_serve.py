"""Generation: bytes that a step reads, and what grows with what."""

import json
from dataclasses import replace

import pytest

from expertmesh.cli import main as front
from expertmesh.costs.hardware import find_cluster
from expertmesh.costs.weight_formats import FORMATS, Weights, weights_of_files
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.sizes import sizes_of
from expertmesh.models.registry import recipe
from expertmesh.planner.dense_twin import dense_twin
from expertmesh.planner.published import published_models
from expertmesh.planner.search import SAFE
from expertmesh.planner.serve import serve_plan
from expertmesh.planner.serve_table import serve_text
from expertmesh.planner.serving_layout import Serving, with_most_sequences

QWEN = Serving(published_models()["qwen3-30b"], find_cluster("h100x8"), 64, 4096, 1, 8)


def test_one_token_reads_its_active_weights_once():
    alone = replace(QWEN, cluster=find_cluster("h100x1"), batch=1, context=1, route_degree=1)
    sizes = alone.sizes
    read = 2 * (sizes.active_parameters - sizes.dim * sizes.vocab_size)  # the embedding is looked up
    expected = read / alone.cluster.device.read_bytes_per_s
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
    """Grouped heads are shared out over tensor-parallel devices as far as there are some; latents are on each of
    them."""
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
        ({"weights": Weights.all("float32")}, "weights_s"),
        ({"expert_slots": 4}, "fetches_s"),
        ({"batch": 65}, "sequences_s"),
        ({"redundant": 64, "batch": 4096}, "weights_s"),
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


@pytest.mark.parametrize("name", FORMATS)
def test_weights_have_the_bytes_of_their_format(name):
    way = replace(QWEN, weights=Weights.all(name))
    sizes, outside = way.sizes, Weights.all(name).bytes_of("embedding")
    experts = sizes.expert_parameters / 8 * FORMATS[name].bytes_each
    matrices = sum(b.count * (b.attention_elements + b.dense_elements) for b in sizes.blocks)
    small = sizes.dense_parameters - sizes.outside_parameters - matrices
    expected = experts + matrices * FORMATS[name].bytes_each + 2 * small
    assert way.weights_held_bytes == pytest.approx(expected + outside * sizes.outside_parameters)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"quant_method": "mxfp4"}, Weights(experts="mxfp4")),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, Weights.all("fp8")),
        ({"quant_method": "gptq", "bits": 4}, Weights.all("int4")),
        ({"quant_method": "gptq", "bits": 8}, Weights.all("int8")),
        ({"quant_method": "awq", "bits": 4}, Weights.all("int4")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, Weights.all("int8")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, Weights.all("nvfp4")),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}}}}, Weights.all("int4")),  # noqa: E501
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8, "type": "float"}}}}, Weights.all("fp8")),  # noqa: E501
        ({"quant_method": "new"}, None),
        ({"bits": 4}, None),
        (None, None),
    ],
)  # fmt: skip
def test_formats_of_files_are_read(given, expected):
    assert weights_of_files(given) == expected


@pytest.mark.parametrize(
    ("name", "cluster", "options", "gib"),
    [
        ("gpt-oss-120b", "h100x1", {}, 61),
        ("gpt-oss-120b", "h100x2", {}, 32),
        ("deepseek-v3", "h200x8", {}, 94),
        ("qwen3-30b", "laptopx1", {"weights": "int4"}, 16),
        ("qwen3-30b", "rtx-5090x1", {"weights": "int4", "cache": "fp8"}, 16),
    ],
)
def test_what_people_serve_fits(name, cluster, options, gib):
    found = serve_plan(name, cluster=cluster, batch=1, context=4096, **options)
    held = {round(way.weights_held_bytes / 2**30) for way in found.ways}
    assert gib in held


def test_experts_without_a_slot_are_fetched():
    one = replace(QWEN, cluster=find_cluster("rtx-4090x1"), route_degree=1, batch=1)
    block = one.sizes.blocks[0]
    few, more = (replace(one, expert_slots=n) for n in (8, 32))
    assert few.weights_held_bytes < more.weights_held_bytes < one.weights_held_bytes
    assert few.away_bytes + few.weights_held_bytes == pytest.approx(one.weights_held_bytes)
    missed = block.count * 8 * (1 - 8 / 128) * block.expert_parameters * 2
    assert few.seconds.fetches_s == pytest.approx(missed / 20e9)
    assert few.seconds.fetches_s > more.seconds.fetches_s > one.seconds.fetches_s == 0
    on_disk = replace(few, cluster=find_cluster("laptopx1"))
    assert on_disk.is_on_disk and not few.is_on_disk


def test_copies_let_devices_share_experts_that_they_do_not_divide():
    ways = serve_plan("deepseek-v3", cluster="h200x72", batch=72, context=4096, num_redundant_experts=32).ways
    assert 72 in {way.route_degree for way in ways}
    plain = serve_plan("deepseek-v3", cluster="h200x72", batch=72, context=4096).ways
    assert all(256 % way.route_degree == 0 or 2048 % (way.route_degree // 8) == 0 for way in plain)
    for way in ways:
        for block in way.sizes.blocks:
            assert way.experts_here(block) * way.route_degree == (288 if block.num_experts else 0)


@pytest.mark.parametrize("devices", [48, 72, 96, 144])
def test_devices_that_do_not_divide_experts_cost_no_slices(devices):
    """Wide groups have copies of experts; their exchange takes about as long as that of the next power of two."""
    sizes = published_models()["deepseek-v3"]
    times = {}
    for number in (devices, 1 << (devices - 1).bit_length()):
        way = Serving(sizes, find_cluster(f"h100x{number}"), 64 * number, 4096, 1, number, fused=True)
        times[number] = way.seconds.exchange_s
        for block in way.sizes.blocks:
            assert way.experts_here(block) == -(-block.num_experts // number)
    assert times[devices] <= 1.1 * max(times.values()) and len(times) == 2
    assert times[devices] < 1.2 * times[1 << (devices - 1).bit_length()]


@pytest.mark.parametrize(
    ("name", "cluster", "batch", "is_full"),
    [
        ("qwen3-30b", "h100x1", 40, True),
        ("qwen3-30b", "h100x1", 4, False),
        ("mixtral-8x7b", "h100x2", 120, True),
    ],
)
def test_a_full_device_is_marked_and_a_safer_plan_given(name, cluster, batch, is_full):
    found = serve_plan(name, cluster=cluster, batch=batch, context=4096)
    assert (found.best.filled > SAFE) == is_full == ("above 92 %" in serve_text(found))
    assert (found.safer is not None) == is_full
    assert found.safer is None or found.safer.filled <= SAFE


def test_prompts_cost_time_and_money():
    asked = replace(QWEN, prompt=2048, answer=512)
    longer = replace(asked, prompt=8192)
    assert QWEN.prefill_s == 0 and QWEN.token_s == QWEN.seconds.total_s
    assert asked.first_token_s == asked.prefill_s + asked.seconds.total_s
    assert longer.prefill_s > 4 * asked.prefill_s * 0.9
    assert longer.token_s > asked.token_s > asked.seconds.total_s
    assert asked.requests_per_s * 512 == pytest.approx(asked.tokens_per_s)
    assert asked.usd_per_million_of_prompts[0] < asked.usd_per_million[0]
    hourly = sum(
        rate * 1e-6 * tokens * asked.requests_per_s * 3600
        for rate, tokens in (
            (asked.usd_per_million_of_prompts[0], 2048),
            (asked.usd_per_million[0], 512),
        )
    )
    assert hourly == pytest.approx(8 * asked.cluster.device.usd_per_hour[0])


def test_as_many_sequences_as_the_time_per_token_allows():
    for limit in (0.02, 0.05):
        found = with_most_sequences(replace(QWEN, prompt=1024, answer=1024), limit)
        assert found.fits and found.token_s <= limit
        more = replace(found, batch=found.batch + 8)
        assert not more.fits or more.token_s > limit
    assert with_most_sequences(QWEN, 1e-6) is None
    plan = serve_plan("qwen3-30b", cluster="h100x8", token_ms=40, prompt=1024, answer=1024)
    rates = [way.requests_per_s for way in plan.ways]
    assert rates == sorted(rates, reverse=True) and plan.best.token_s <= 0.04


def test_a_dense_twin_has_the_geometric_mean_of_the_parameters():
    for name in ("qwen3-30b", "deepseek-v3", "gpt-oss-120b"):
        sizes = published_models()[name]
        twin = dense_twin(sizes)
        wanted = (sizes.num_parameters * sizes.active_parameters) ** 0.5
        assert twin.num_parameters == pytest.approx(wanted, rel=0.02)
        assert twin.active_parameters == twin.num_parameters
        assert twin.num_parameters == twin.dense_parameters
    assert dense_twin(twin) is None


def test_json_has_what_the_table_has(capsys):
    words = "plan qwen3-30b --cluster h100x8 --serve --batch 64 --prompt 1k --answer 1k --json"
    assert front.main(words.split()) == 0
    found = json.loads(capsys.readouterr().out)
    plan = serve_plan("qwen3-30b", cluster="h100x8", batch=64, prompt=1024, answer=1024)
    assert found["best"]["token_s"] == plan.best.token_s
    assert found["best"]["first_token_s"] == plan.best.first_token_s
    assert sum(found["best"]["time_s"].values()) == pytest.approx(plan.best.token_s)
    assert found["dense_twin"]["parameters"] == plan.twin.sizes.num_parameters


WRONG = [
    (["--serve", "--batch", "8"], "must be given where prompt and answer are not"),
    (["--serve", "--context", "8"], "give --batch or --token-ms"),
    (
        ["--serve", "--context", "8", "--batch", "8", "--token-ms", "9"],
        "give --batch or --token-ms",
    ),
    (["--serve", "--batch", "8", "--context", "8", "--prompt", "8"], "use 9"),
    (["--serve", "--batch", "8", "--context", "8", "--prompt", "8", "--answer", "4"], "use 12"),
    (
        ["--serve", "--batch", "8", "--context", "8", "--weights", "int3"],
        "must have formats of float32",
    ),
    (
        ["--serve", "--batch", "8", "--context", "8", "--weights", "heads=fp8"],
        "must name parts of experts",
    ),
    (
        ["--serve", "--batch", "8", "--context", "8", "--cache", "int4"],
        "--cache int4: must be one of",
    ),
    (
        ["--serve", "--batch", "8", "--context", "8", "--expert-slots", "0"],
        "--expert-slots 0: must be",
    ),
    (
        ["--serve", "--batch", "8", "--context", "8", "--num-redundant-experts", "-1"],
        "must be a whole",
    ),
    (["--serve", "--token-ms", "0", "--context", "8"], "--token-ms 0.0: must be"),
    (["--serve", "--token-ms", "0.5", "--context", "8"], "ms at best, not 0.5"),
    (["--weights", "fp8"], "--weights fp8: is an option of inference"),
    (["--graphs"], "is an option of inference"),
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
