"""What `--train.dtype auto` computes in: by instructions and sizes, whatever a clock says; kept with the run, followed when it goes on."""

import re
from pathlib import Path

import pytest
import torch
from tests.support.runs import losses_of

import expertmesh
from expertmesh.config.run import TrainConfig
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.costs import dominant_products
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.ops.cpu import products as cpu_products
from expertmesh.ops.onednn import has_onednn
from expertmesh.runs import arithmetic, precision
from expertmesh.runs.arithmetic import chosen, threads_for
from expertmesh.runs.precision import resolve_precision
from expertmesh.runs.run_dir import RunDir

SOURCE = Path(expertmesh.__file__).parent
CPU = torch.device("cpu")
USUAL = cpu_products.usual_library()


@pytest.mark.parametrize(
    ("sizes", "has_amx", "dtype", "why"),
    [
        ([(256, 256, 256)], True, "bfloat16", "auto: the processor has AMX"),
        ([(255, 256, 256)], True, "float32", "auto: products of 16.7 M .* too small for AMX"),
        ([(16, 16, 16, 1000), (512, 512, 512, 1)], True, "bfloat16", "AMX"),
        ([(256, 256, 256)], False, "float32", "auto: the processor has no AMX"),
        ([], True, "bfloat16", "AMX"),
    ],
)
def test_instructions_and_sizes_decide(sizes, has_amx, dtype, why):
    found = chosen([Product(*one) for one in sizes], has_amx=has_amx)
    assert (found.dtype, found.library) == (dtype, USUAL) and re.search(why, found.reason)


@pytest.mark.parametrize(
    ("side", "count"), [(1, 1), (128, 1), (255, 1), (256, 2), (512, 5), (1024, 16), (4096, 128)]
)
def test_threads_grow_with_the_products(side, count):
    assert threads_for([Product(side, side, side)]) == count


WHO_MAY_TIME = {
    # by design among ways of other bits, documented, its plans kept: the tuner of dispatch options
    "parallel/experts/adaptive.py",
    # measured numbers that are shown, and links that the cost model of that tuner begins with
    *("comm/measure.py", "cli/machine.py"),
    # rates, waits and times that are reported
    *("training/loop.py", "training/stop.py", "training/ends.py", "training/pace.py"),
    *("checkpoints/store.py", "comm/start.py", "cli/torchrun.py", "cli/terminal_progress.py"),
    *("data/data_progress.py", "engine/engine.py", "engine/answers.py", "engine/timing.py"),
}
"""Modules that look at a clock."""


def test_who_looks_at_a_clock():
    clock = re.compile(r"time\.(perf_counter|thread_time|process_time|monotonic)\b|enable_timing")
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if clock.search(path.read_text(encoding="utf-8"))
    }
    assert {name for name in found if not name.startswith("serve/")} - WHO_MAY_TIME == set()


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
def test_a_run_goes_on_as_it_began_on_a_processor_that_would_now_choose_otherwise(
    tiny, run_quietly, tmp_path, monkeypatch, first
):
    answer = {}

    def fake(products):
        assert products, "the model's own"
        return arithmetic.Arithmetic("cpu", answer["is"], USUAL, "auto: asked")

    monkeypatch.setattr(precision, "chosen", fake)

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
        found = resolve_precision(TrainConfig(device="cpu"), record=record)
        assert found.arithmetic.library == library
        with found.autocast():
            expected = library == "onednn" and has_onednn()
            assert cpu_products.goes_to_onednn(torch.float32, CPU) == expected
    arithmetic.write_arithmetic(record, arithmetic.Arithmetic("cuda", "bfloat16", "blas"))
    found = resolve_precision(TrainConfig(device="cpu", dtype="float32"), record=record)
    assert found.arithmetic.device == "cpu", "that of another device says nothing"


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"device": "cpu"}', '{"device": "cpu", "dtype": "float32", "library": "x"}']
    + ['{"device": "cpu", "dtype": "float31", "library": "blas"}']
    + ['{"device": "cpu", "dtype": "float32", "library": "blas", "reason": 3}'],
)
def test_a_damaged_record_is_one_line(tmp_path, text):
    (record := tmp_path / "arithmetic.json").write_text(text)
    with pytest.raises(ConfigError, match="arithmetic.json: is unreadable; delete it"):
        resolve_precision(TrainConfig(device="cpu"), record=record)


def test_a_record_of_a_version_that_measured_is_read(tmp_path):
    text = '{"device": "cpu", "dtype": "bfloat16", "library": "blas", "seconds": {"a": 1}, "threads": 2}'
    (record := tmp_path / "arithmetic.json").write_text(text)
    found = arithmetic.read_arithmetic(record)
    assert (found.dtype, found.threads) == ("bfloat16", 2)
