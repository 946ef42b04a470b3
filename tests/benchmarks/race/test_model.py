"""The model of each kernel's time: its work adds up, written predictions win, and a bad file is refused."""

import json

import pytest
from benchmarks.race.shapes import SHAPES, chosen

from benchmarks.race import model

(QWEN,) = chosen(("qwen3-8k",))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_kernels_add_up_to_the_step(shape):
    products = [k for k in model.KERNELS if "combine" not in k and "router" not in k]
    assert sum(model.work(shape, k).flops for k in products) == shape.flops("both")
    experts = [k for k in model.FORWARD if k not in ("router", "maps")]
    assert sum(model.work(shape, k).num_bytes for k in experts) == shape.least_bytes("forward")
    for kernel in model.KERNELS:
        floor_s = model.work(shape, kernel).num_bytes / model.Chip().bytes_per_s
        assert model.modelled_s(shape, kernel) > floor_s


def test_a_slower_chip_takes_longer():
    slow = model.Chip(described=300e12, gathered=250e12, narrow=215e12, router=20e12)
    for kernel in model.KERNELS:
        assert model.modelled_s(QWEN, kernel, slow) >= model.modelled_s(QWEN, kernel)
    assert model.modelled_s(QWEN, "up", slow) > 1.8 * model.modelled_s(QWEN, "up")


def test_a_written_prediction_wins(tmp_path):
    file = tmp_path / "predictions.json"
    given = {"source": "a guess", "microseconds": {"qwen3-8k": {"up": 900}}}
    file.write_text(json.dumps(given))
    assert model.predicted(QWEN, "up", file) == model.Prediction(900.0, "a guess")
    assert model.predicted(QWEN, "down", file).source == "model"


@pytest.mark.parametrize("bad", [{"upp": 3.0}, {"up": 0}])
def test_a_file_with_a_mistake_is_refused(tmp_path, bad):
    file = tmp_path / "predictions.json"
    file.write_text(json.dumps({"source": "", "microseconds": {"qwen3-8k": bad}}))
    with pytest.raises(ValueError, match="known are router"):
        model.predicted(QWEN, "up", file)


def test_the_written_predictions_are_sound():
    names = {shape.name for shape in SHAPES}
    assert set(model.written()["microseconds"]) <= names
