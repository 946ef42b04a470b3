"""What `--train.dtype auto` computes in: measured once, kept with the run, followed when it goes on."""

import pytest
import torch
from tests.support.runs import losses_of

from expertmesh.config.run import TrainConfig
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.costs import dominant_products
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.onednn import has_onednn
from expertmesh.runs import arithmetic
from expertmesh.runs.arithmetic import MatmulChoice, choose, fastest, measure
from expertmesh.runs.precision import resolve_precision
from expertmesh.runs.run_dir import RunDir

CPU = torch.device("cpu")
USUAL = cpu_products.usual_library()
OTHER = "blas" if USUAL == "onednn" else "onednn"
FP32, FP32_OTHER, BF16 = (
    MatmulChoice("float32", USUAL),
    MatmulChoice("float32", OTHER),
    MatmulChoice("bfloat16", USUAL),
)


@pytest.mark.parametrize(
    ("other", "bf16", "expected"),
    [
        (1.0, 0.89, BF16),
        (1.0, 0.91, FP32),
        (0.89, 0.85, FP32_OTHER),
        (0.89, 0.79, BF16),
        (0.91, 1.5, FP32),
    ],
)
def test_fp32_by_the_usual_library_wins_within_a_tenth(other, bf16, expected):
    found = choose({FP32: 1.0, FP32_OTHER: other, BF16: bf16})
    assert found.dtype == expected.dtype
    assert found.dtype == "bfloat16" or found.library == expected.library
    assert "bfloat16" in found.reason and "float32 by" in found.reason


def test_every_way_is_measured_and_nothing_stays_changed():
    threads = torch.get_num_threads()
    found = measure([Product(64, 96, 80, count=3), Product(512, 4096, 4096)])
    expected = {FP32, FP32_OTHER, BF16} if has_onednn() else {FP32}
    assert set(found) == expected and all(seconds > 0 for seconds in found.values())
    assert torch.get_num_threads() == threads
    assert cpu_products.goes_to_onednn(torch.float32, CPU) == (USUAL == "onednn")


@pytest.mark.parametrize("recipe", ["gpt-moe-demo", "gpt-dense-demo", "gpt-moe-test"])
def test_products_are_the_work_of_a_step(recipe):
    config = RECIPES[recipe]()
    tokens = config.train.batch_size * config.data.seq_len
    flops = forward_flops(config.model, seq_len=config.data.seq_len)
    work = flops.total_flops - flops.attention_flops - flops.router_flops
    products = dominant_products(config)
    assert 2 * sum(p.size * p.count for p in products) == tokens * work
    halves = dominant_products(config, num_parts=2)
    assert (
        2 * sum(p.size * p.count for p in halves)
        == sum(2 * p.size * p.count for p in products) // 2
    )


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_either_library_multiplies_while_it_is_asked_to():
    a, b = torch.randn(128, 128), torch.randn(128, 128)
    for library in ("onednn", "blas"):
        with cpu_products.multiplying_by(library):
            assert cpu_products.is_worth_it(a, b) == (library == "onednn")
    assert cpu_products.is_worth_it(a, b) == (USUAL == "onednn")


@pytest.mark.parametrize("first", ["float32", "bfloat16"])
def test_a_run_goes_on_as_it_began_where_the_measurement_would_now_differ(
    tiny, run_quietly, tmp_path, monkeypatch, first
):
    answer = {}

    def measured(products):
        assert products, "the model's own"
        return {FP32: 1.0, BF16: 0.5 if answer["is"] == "bfloat16" else 2.0}

    monkeypatch.setattr(arithmetic, "measure", measured)

    def run(name, dtype, **options):
        answer["is"] = dtype
        config = tiny(**{"train.dtype": "auto", "train.run_dir": str(tmp_path / name)}, **options)
        run_quietly(config)
        return config

    other = "float32" if first == "bfloat16" else "bfloat16"
    whole = losses_of(run("whole", first))
    schedule = {"optim.schedule_steps": 8}
    run("parts", first, **{"train.steps": 4}, **schedule)
    config = run("parts", other, **{"train.resume": "auto"}, **schedule)
    assert losses_of(config) == whole
    assert losses_of(run("other", other)) != whole, (
        "the two types must differ for this to show anything"
    )
    record = RunDir(config.train.run_dir).arithmetic
    for dtype in ("auto", first):
        found = resolve_precision(TrainConfig(device="cpu", dtype=dtype), record=record)
        assert found.compute_dtype == getattr(torch, first)


def test_the_library_of_a_run_is_followed(tmp_path):
    record = tmp_path / "arithmetic.json"
    for library in ("onednn", "blas"):
        arithmetic.write_arithmetic(record, arithmetic.Arithmetic("cpu", "float32", library))
        precision = resolve_precision(TrainConfig(device="cpu"), record=record)
        assert precision.arithmetic.library == library
        with precision.autocast():
            expected = library == "onednn" and has_onednn()
            assert cpu_products.goes_to_onednn(torch.float32, CPU) == expected
    arithmetic.write_arithmetic(record, arithmetic.Arithmetic("cuda", "bfloat16", "blas"))
    found = resolve_precision(TrainConfig(device="cpu", dtype="float32"), record=record)
    assert found.arithmetic.device == "cpu", "that of another device says nothing"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"device": "cpu"}', '{"device": "cpu", "dtype": "float32", "library": "x"}']
    + ['{"device": "cpu", "dtype": "float31", "library": "blas"}']
    + ['{"device": "cpu", "dtype": "float32", "library": "blas", "seconds": 3}'],
)
def test_a_damaged_record_is_one_line(tmp_path, text):
    (record := tmp_path / "arithmetic.json").write_text(text)
    with pytest.raises(ConfigError, match="arithmetic.json: is unreadable; delete it"):
        resolve_precision(TrainConfig(device="cpu"), record=record)


def test_a_model_that_names_no_products_is_measured_with_usual_ones():
    assert fastest(()).dtype in ("float32", "bfloat16")
