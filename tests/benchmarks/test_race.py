"""The race without a GPU: every part runs, results are checked before they count, verdicts follow from the numbers."""

import importlib
import json
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(monkeypatch):
    """Give a module of the benchmarks by name."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def small_race(module):
    """A race of our layer and its peers on the CPU: shape, racers, weights, inputs, generator."""
    shapes, contenders = module("race_shapes"), module("race_contenders")
    shape = shapes.SHAPES[0].tiny()
    generator = torch.Generator().manual_seed(0)
    weights = contenders.WeightSet.draw(shape, "cpu", generator)
    inputs = contenders.Inputs.draw(shape, "cpu", generator)
    racers, missing = contenders.field_of(shape, device="cpu")
    return shape, racers, missing, weights, inputs, generator


def test_all_parts_run_and_are_judged(module, tmp_path, capsys):
    race = module("race")
    shapes = ("qwen3-8k", "blog-e16")
    race.main(
        device="cpu", tiny=True, rounds=1, shapes=shapes, name="dry", out=tmp_path,
        parts=("ceilings", "metadata", "layers", "skew", "decode"),
    )  # fmt: skip
    record = json.loads((tmp_path / "dry.json").read_text())
    assert set(record["layers"]) == set(shapes)
    names = {row["contender"] for row in record["layers"]["blog-e16"]["rows"]}
    assert {"expertmesh", "torch grouped_mm", "einsum"} <= names
    assert len(record["decode"]) == 8
    text = (tmp_path / "dry.md").read_text()
    for words in (
        "## Hard lines",
        "## Goals",
        "of the roofline",
        "Not in the table: Liger",
        "## Decoding",
    ):
        assert words in text
    bars = ElementTree.fromstring((tmp_path / "dry.svg").read_text())
    assert len(bars) > 6
    assert "qwen3-8k         both" in capsys.readouterr().out


def test_properties_hold(module):
    found = module("race_properties")
    step = found._Step(module("race_shapes").SHAPES[0].tiny(), "cpu")
    assert "X + H" in found.saved(step)
    assert "bitwise equal" in found.repeatable(step)


def test_a_broken_property_is_a_row(module, monkeypatch):
    found = module("race_properties")

    def broken(step):
        raise AssertionError("y differs")

    monkeypatch.setattr(found, "ON_ANY_DEVICE", {"bits": broken})
    (row,) = found.properties(module("race_shapes").SHAPES[0].tiny(), "cpu")
    assert row == {"property": "bits", "holds": "NO", "what was seen": "y differs"}


@pytest.mark.parametrize("name", ["w_in", "w_out", "y", "x"])
def test_the_sampled_oracle_sees_a_small_error(module, small_race, monkeypatch, name):
    shape, racers, _, weights, inputs, generator = small_race
    check = module("race_check")
    run = check.of_racer

    def slightly_wrong(*args):
        found = run(*args)
        getattr(found, {"y": "y_SD", "x": "x_SD"}.get(name, name)).mul_(1.05)
        return found

    about = (weights, inputs.batches[0], inputs.grad_TD, generator)
    for racer in racers:
        assert check.check(shape, racer, *about) < check.FAR_OFF
    monkeypatch.setattr(check, "of_racer", slightly_wrong)
    with pytest.raises(AssertionError, match="expertmesh at qwen3-8k"):
        check.check(shape, racers[0], *about)


def test_wrong_results_of_ours_stop_the_race_and_of_peers_leave_it(module, monkeypatch, tmp_path):
    race, harness, contenders = module("race"), module("harness"), module("race_contenders")
    check = race.check

    def wrong(name):
        def checked(shape, racer, *rest):
            assert racer.name != name, "off by 0.3"
            return check(shape, racer, *rest)

        return checked

    def run():
        race.main(
            device="cpu", tiny=True, rounds=1, shapes=("fine-32k",), parts=("layers",), name="dry", out=tmp_path
        )  # fmt: skip

    monkeypatch.setattr(race, "check", wrong(contenders.GROUPED_MM))
    run()
    record = json.loads((tmp_path / "dry.json").read_text())["layers"]["fine-32k"]
    assert contenders.GROUPED_MM not in {row["contender"] for row in record["rows"]}
    assert any("off by 0.3" in note for note in record["notes"])
    monkeypatch.setattr(race, "check", wrong(contenders.OURS))
    with pytest.raises(harness.ResultsAreWrongError, match="no time counts"):
        run()


def test_contenders_share_their_weights(small_race):
    _, racers, _, weights, _, _ = small_race
    places = {weights.w_in_EGFD.data_ptr(), weights.w_out_EDF.data_ptr()}
    for racer in racers:
        racer.take(weights)
        large = {p.data_ptr() for p in racer.module.parameters() if p.dim() > 2}
        assert large == places, racer.name
        assert all(p.grad is None for p in racer.module.parameters())


def test_missing_peers_are_named(small_race):
    _, _, missing, _, _, _ = small_race
    assert any(why.startswith("SonicMoE: ") for why in missing)


def test_nothing_begins_that_does_not_fit(module, tmp_path, capsys):
    race = module("race")
    clock, report = module("race_clock"), module("race_report")
    now = [0.0]
    record = {"circumstances": {}, "layers": {}}
    run = race.Race(
        device="cpu", tiny=True, rounds=1, budget=clock.Budget(100, lambda: now[0]), record=record,
        save=lambda: report.write(tmp_path / "dry", record | {"circumstances": race.surroundings("cpu")}, command=""),
    )  # fmt: skip
    shapes = module("race_shapes").SHAPES[:2]
    run.longest_shape_s = 50.0
    now[0] = 60.0
    run.layers(list(shapes))
    assert record["layers"] == {}
    assert "left out, 40 s are left" in capsys.readouterr().out


def test_results_of_the_same_circumstances_are_kept(module, tmp_path):
    report = module("race_report")
    file = tmp_path / "dry.json"
    file.write_text(json.dumps({"circumstances": {"gpu": "a"}, "layers": {"x": {}}}))
    assert report.load(tmp_path / "dry", {"gpu": "a"})["layers"] == {"x": {}}
    assert report.load(tmp_path / "dry", {"gpu": "b"})["layers"] == {}


def test_verdicts(module):
    report = module("race_report")

    def row(name, speed):
        return {"contender": name} | {
            f"{phase} TFLOP/s": speed for phase in ("forward", "backward", "both")
        }

    rows = [row("expertmesh", 400.0), row("Liger-Kernel fused MoE", 300.0), row("SonicMoE", 401.0)]
    record = {"layers": {"qwen3-8k": {"rows": rows}}, "metadata": [{"faster by": 30.0}]}
    lines = {(r["shape"], r["against"]): r["verdict"] for r in report.hard_lines(record)}
    assert "holds" in lines["qwen3-8k", "Liger-Kernel fused MoE"]
    assert "MISSED" in lines["qwen3-8k", "SonicMoE"]
    assert lines["qwen3-8k", "transformers grouped_mm"] == "not raced"
    assert lines["blog-e2", "einsum"] == "not raced"
    assert "holds" in lines["route_metadata", "one-hot + cumsum"]
    goals = {r["pass"]: r[""] for r in report.stretch(record)}
    assert goals == {"forward": "not: 95 %", "backward": "reached", "both": "reached"}


def test_operations_and_memory(module):
    shapes = {shape.name: shape for shape in module("race_shapes").SHAPES}
    qwen, blog = shapes["qwen3-8k"], shapes["blog-e2"]
    assert qwen.flops("forward") == 6 * 8192 * 8 * 2048 * 768
    assert blog.flops("forward") == 4 * 32_768 * 2 * 2048 * 2048
    assert qwen.flops("both") == 3 * qwen.flops("forward")
    deepseek = shapes["deepseek-8k"]
    assert 20 * 2**30 < deepseek.weight_bytes < 23 * 2**30
    assert [deepseek.weight_sets(size) for size in (40 << 30, 78 << 30, 139 << 30)] == [0, 1, 2]


class _Device:
    """Stands for torch.cuda: writes down what is asked of it."""

    def __init__(self):
        self.calls = []

    def event(self, enable_timing):
        device = self

        class Event:
            def record(self):
                device.calls.append("event")

            def elapsed_time(self, end):
                return 2.0

        return Event()

    def _sleep(self, cycles):
        self.calls.append("wait")

    def synchronize(self):
        self.calls.append("synchronize")


def test_order_of_a_measurement_on_a_gpu(module, monkeypatch):
    clock = module("race_clock")
    device = _Device()
    stopwatch = clock.Stopwatch("cpu")
    stopwatch.is_cuda = True

    class Junk:
        def zero_(self):
            device.calls.append("flush")

    stopwatch._junk = Junk()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    for name in ("_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, getattr(device, name))
    parts = [lambda: device.calls.append("a"), lambda: device.calls.append("b")]
    seconds = stopwatch.times(parts)
    one = ["wait", "flush", "event", "{}", "event"]
    expected = [c.format(p) for p in "ab" for c in one]
    assert device.calls == [*expected, "synchronize"]
    assert [device_s for device_s, _ in seconds] == [0.002, 0.002]


def test_rounds_take_turns(module):
    clock = module("race_clock")
    calls = []
    entries = [
        clock.Entry(
            n,
            lambda r, n=n: calls.append(f"{n}{r}"),
            {"p": lambda: time.sleep(0)},
            lambda n=n: calls.append(n),
        )
        for n in "ab"
    ]
    samples = clock.interleaved(entries, clock.Stopwatch("cpu"), rounds=2, warmup=1)
    assert calls == ["a0", "a", "b0", "b", "b1", "b", "a1", "a", "a2", "a", "b2", "b"]
    assert len(samples["a"]["p"].device_s) == 2


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
def test_a_small_race_on_the_gpu(module, tmp_path):
    race, contenders = module("race"), module("race_contenders")
    race.main(
        device="cuda", tiny=True, rounds=2, shapes=("qwen3-8k", "blog-e16"), peers=(contenders.GROUPED_MM,),
        warm=False, name="dry", out=tmp_path,
    )  # fmt: skip
    record = json.loads((tmp_path / "dry.json").read_text())
    assert {row["property"]: row["holds"] for row in record["properties"]} == {
        "saved bytes": "yes",
        "repeatable bits": "yes",
        "torch.compile": "yes",
        "no synchronisation": "yes",
        "one CUDA graph": "yes",
    }
