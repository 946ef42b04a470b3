"""What the trainer does with an encoder-decoder: routing losses, counts of an evaluation, teachers."""

import types

import pytest
import torch
from tests.support.calls import calls_of
from tests.support.runs import train_quietly
from tests.training.test_step import WEIGHTS, assert_routing_losses_are_means

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import DistillConfig, TrainConfig
from expertmesh.errors import ConfigError
from expertmesh.models.registry import recipe
from expertmesh.parallel.ranks import Ranks
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.evaluate import evaluate
from expertmesh.training.teacher import open_teacher
from expertmesh_families.seq2seq.config import Seq2SeqRunConfig
from expertmesh_families.seq2seq.family import SEQ2SEQ
from expertmesh_families.seq2seq.recipes import translate_test
from expertmesh_families.seq2seq.task import Seq2SeqTask

PRECISION = resolve_precision(TrainConfig(device="cpu", dtype="float64"))


def test_routing_losses_are_means_over_the_tokens_that_layers_see():
    """Pairs of which the long source does not have the long target."""
    sizes = {"vocab_size": 320, "dim": 16, "num_heads": 2, "ffn_hidden_dim": 32, "dropout": 0.0}
    moe = {"num_experts": (4,), "top_k": 1, "hidden_dim": 16, **WEIGHTS}
    train = {"dtype": "float64", "device": "cpu"}
    config = Seq2SeqRunConfig(model={**sizes, "moe": moe}, train=train)
    generator = torch.Generator().manual_seed(0)
    source, target = (torch.randint(0, 256, (4, 16), generator=generator) for _ in range(2))
    lengths = torch.tensor([3, 16, 9, 5]), torch.tensor([12, 4, 4, 16])
    samples = (source, lengths[0], target, lengths[1], torch.zeros(4).long())
    assert_routing_losses_are_means(Seq2SeqTask(config), samples)


def test_what_is_measured_is_counted_before_it_goes_to_the_device():
    cfg = translate_test().updated({"model.moe": MoEConfig(num_experts=())})
    task = Seq2SeqTask(cfg)
    task._directions = ("de-en", "en-de")
    model = task.builder.build(device="cpu", dtype=torch.float64)
    ids, lengths = torch.full((2, 5), 7), torch.tensor([5, 2])
    batches = [(ids, lengths, ids, lengths, torch.tensor([0, 1]))] * 3
    data = types.SimpleNamespace(validation=lambda *_: batches)
    with calls_of(Seq2SeqTask._forward) as calls:
        evaluate(task, model, data, batch_size=2, max_samples=None, precision=PRECISION)
    assert [variables["part"].num_items for variables, _ in calls] == [7, 7, 7]


def test_a_teacher_of_another_family_is_named(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"family": "seq2seq"}')
    taught = {"distill.teacher": str(tmp_path / "other"), "train.run_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match=r"distill.teacher=.*other: is of family seq2seq and .*gpt"):
        train_quietly(recipe("gpt-moe-test", taught))


def test_a_family_without_lessons_has_no_teacher():
    with pytest.raises(ConfigError, match="does not learn from teachers"):
        task = Seq2SeqTask(Seq2SeqRunConfig(distill=DistillConfig(teacher="x")))
        open_teacher(SEQ2SEQ, task, None, precision=None, ranks=Ranks())
