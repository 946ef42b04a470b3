"""What `--train.dtype auto` computes in: by instructions and sizes, whatever a clock says; kept with the run, followed
when it goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.patience import PATIENCE_S
from tests.support.runs import lines_of, losses_of

import expertmesh
from expertmesh.config.run import TrainConfig
from expertmesh.costs.matrix_products import Product
from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu import library as cpu_library
from expertmesh.models.gpt.costs import dominant_products
from expertmesh.models.gpt.flops import forward_flops
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.ops.backend import cpu_kernels
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


@pytest.mark.parametrize(("side", "count"), [(1, 1), (128, 1), (255, 1), (256, 2), (512, 5), (1024, 16), (4096, 128)])
def test_threads_grow_with_the_products(side, count):
    assert threads_for([Product(side, side, side)]) == count


_REPORTED = "a time or a rate that is reported"
_WAITS = "how long is waited for another process or thread"
_SAID = "when a line is printed"

WHO_MAY_TIME = {
    "parallel/experts/adaptive.py": "the dispatch options of parallel.adaptive, which its run keeps",
    "comm/measure.py": "the links that the tuner of dispatch options begins with",
    "training/ends.py": "after which step train.max_time ends a call",
    "training/stop.py": "whether a second Ctrl-C ends a run at once",
    "cli/torchrun.py": "which rank tells a mistake",
    "cli/machine.py": _REPORTED,
    "training/loop.py": _REPORTED,
    "training/pace.py": _REPORTED,
    "checkpoints/store.py": _WAITS,
    "comm/start.py": _WAITS,
    "cli/terminal_progress.py": _SAID,
    "data/data_progress.py": _SAID,
    "engine/captured.py": _REPORTED,
    "engine/engine.py": _REPORTED,
    "engine/answers.py": _REPORTED,
    "engine/timing.py": _REPORTED,
    "serve/app.py": _REPORTED,
    "serve/writing.py": _REPORTED,
    "serve/openai_writing.py": _REPORTED,
    "integrations/tutel/system.py": _REPORTED,
    "serve/worker.py": _REPORTED,
    "serve/request_metrics.py": _REPORTED,
    "serve/gate.py": _REPORTED,
    "serve/metrics.py": _REPORTED,
    "serve/load_client.py": "when a client sends its requests, and what it reports",
    "serve/server.py": _WAITS,
}
"""Modules that look at a clock, and all that it decides there."""


def test_who_looks_at_a_clock():
    clock = re.compile(
        r"\btime\.(time|perf_counter|thread_time|process_time|monotonic)(_ns)?\b|enable_timing|getloadavg"
        r"|loop\.time\(|\.now\(|\.today\(|from time import|timeit|do_bench|autotune\(|cudnn\.benchmark"
    )
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in (*SOURCE.rglob("*.py"), *SOURCE.with_name("expertmesh_families").rglob("*.py"))
        if clock.search(path.read_text(encoding="utf-8"))
    }
    assert found == set(WHO_MAY_TIME)


MISLEADING = """
import random, time
source = random.Random(1)
for name in ("perf_counter", "process_time", "thread_time"):
    right = getattr(time, name)
    setattr(time, name, lambda right=right: right() + source.random() * 1e3)
"""
TRAINED = """
import json, sys
import expertmesh as em
em.train(em.recipe("gpt-moe-test", json.loads(sys.argv[1])), quiet=True)
"""


@pytest.mark.slow
def test_a_run_by_a_misleading_clock_is_the_same(tiny_in, run_quietly, tmp_path):
    """Type, library, threads and all losses, in a process whose clock leaps."""
    config = tiny_in(tmp_path / "right", **{"train.dtype": "auto"})
    run_quietly(config)
    (tmp_path / "sitecustomize.py").write_text(MISLEADING)
    left, right = tmp_path / "misled", RunDir(config.train.run_dir)
    values = config.updated({"train.run_dir": str(left)}).model_dump(mode="json")
    paths = [str(tmp_path), str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    subprocess.run(
        [sys.executable, "-c", TRAINED, json.dumps(values)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        timeout=PATIENCE_S,
    )
    assert (left / "arithmetic.json").read_text() == right.arithmetic.read_text()
    assert lines_of(left) == lines_of(right.path) != []


@pytest.mark.parametrize("recipe", ["gpt-moe-demo", "gpt-dense-demo", "gpt-moe-test"])
def test_products_are_the_work_of_a_step(recipe):
    config = RECIPES[recipe]()
    tokens = config.train.batch_size * config.data.seq_len
    flops = forward_flops(config.model, seq_len=config.data.seq_len)
    work = flops.total_flops - flops.attention_flops - flops.router_flops
    products = dominant_products(config)
    assert 2 * sum(p.size * p.count for p in products) == tokens * work
    halves = dominant_products(config, num_parts=2)
    assert 2 * sum(p.size * p.count for p in halves) == sum(2 * p.size * p.count for p in products) // 2


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
    assert losses_of(run("other", other)) != whole, "the two types must differ for this to show anything"
    record = RunDir(config.train.run_dir).arithmetic
    for dtype in ("auto", first):
        found = resolve_precision(TrainConfig(device="cpu", dtype=dtype), record=record)
        assert found.compute_dtype == getattr(torch, first)


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("later", [None, "torch"])
def test_an_exact_run_says_when_it_goes_on_by_other_kernels(tiny, run_quietly, tmp_path, caplog, is_exact, later):
    options = {"train.run_dir": str(tmp_path / "run"), "model.batch_invariant": is_exact}
    schedule = {"optim.schedule_steps": 4, **options}
    run_quietly(tiny(**{"train.steps": 2}, **schedule))
    record = json.loads((tmp_path / "run" / "arithmetic.json").read_text())
    assert record["kernels"] == cpu_kernels()
    own = cpu_library._loaded[:]
    if later:
        cpu_library.lower(later)
    try:
        run_quietly(tiny(**{"train.steps": 4, "train.resume": "auto"}, **schedule))
    finally:
        cpu_library._loaded[:] = own
    said = [one.getMessage() for one in caplog.records if one.name == "expertmesh.training"]
    says = is_exact and record["kernels"] != (later or record["kernels"])
    assert len(said) == says
    if says:
        assert f"exact by the kernels {record['kernels']} and goes on by torch" in said[0]
    kept = json.loads((tmp_path / "run" / "arithmetic.json").read_text())["kernels"]
    assert kept == (later or record["kernels"])


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
    + ['{"device": "cpu", "dtype": "float32", "library": "blas", "reason": 3}']
    + ['{"device": "cpu", "dtype": "float32", "library": "blas", "kernels": "sse9"}'],
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
