"""The trainer's benchmark trains equal models, and refuses to report when they are not."""

import pytest
import torch

from benchmarks import trainer
from expertmesh.models.gpt.recipes import RECIPES

pytest.importorskip("transformers")


@pytest.fixture
def config():
    return RECIPES["gpt-moe-test"]()


def random_batches(config, count):
    generator = torch.Generator().manual_seed(0)
    shape = (2, config.data.seq_len + 1)
    ids = [torch.randint(0, config.model.vocab_size, shape, generator=generator) for _ in range(count)]
    return [(i[:, :-1], i[:, 1:]) for i in ids]


def test_check_sees_another_size_and_a_loss_that_is_not_finite(config):
    ours, rival = (
        trainer.ours(config, "float32"),
        trainer.peer(config, "grouped_mm", "float32", "plain"),
    )
    batches = random_batches(config, 1) * 3
    expected = trainer.first_loss(config)
    trainer.check([ours, rival], batches, expected)
    assert len(ours.losses) == len(rival.losses) == 3
    with pytest.raises(AssertionError, match="a fresh model has"):
        trainer.check([trainer.ours(config, "float32")], batches, 2 * expected)
    rival.losses.append(float("nan"))
    with pytest.raises(AssertionError, match="not finite"):
        trainer.check_finite([ours, rival])
    rival.num_parameters += 1
    with pytest.raises(AssertionError, match="parameters"):
        trainer.check([ours, rival], batches, expected)


@pytest.mark.parametrize("mode", ["autocast", "FP32 copy", "pure"])
def test_peers_in_bf16_learn_as_in_fp32(config, mode):
    batches = random_batches(config, 1) * 4
    rival = trainer.peer(config, "eager", "bfloat16", mode)
    trainer.check([rival], batches, trainer.first_loss(config))
    assert rival.keeps_fp32 == (mode != "pure")


def test_a_shape_that_no_mixtral_has_is_refused():
    with pytest.raises(ValueError, match="use another recipe"):
        trainer.make_mixtral(RECIPES["gpt-dense-demo"](), "eager")


@pytest.mark.slow
def test_trainer_benchmark_runs_and_writes(tmp_path):
    few = {"dtypes": ("float32",), "implementations": ("grouped_mm",)}
    trainer.main("gpt-moe-test", threads=1, rounds=1, check_steps=2, **few, out=tmp_path)
    text = (tmp_path / "trainer_cpu_202611.md").read_text()
    assert "expertmesh" in text
    assert "transformers grouped_mm" in text
    assert (tmp_path / "trainer_cpu_202611.json").exists()
