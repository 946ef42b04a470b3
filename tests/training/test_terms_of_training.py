"""An evaluation has no term and no chance of training: not in our families, and not in the doors."""

import types

import pytest
import torch
from tests.support.known_rows import known

from expertmesh.config.run import TrainConfig
from expertmesh.models.gpt.task import GPTTask
from expertmesh.models.registry import find_family, recipe
from expertmesh.runs.precision import resolve_precision
from expertmesh.training.evaluate import evaluate

PRECISION = resolve_precision(TrainConfig(device="cpu", dtype="float64"))


def text(config):
    g = torch.Generator().manual_seed(0)
    ids, targets = torch.randint(config.model.vocab_size, (2, 2, 9), generator=g)
    return ids, targets, torch.ones(2, 9, dtype=torch.int64)


def translations(config):
    ids, lengths = torch.arange(10).view(2, 5) + 300, torch.tensor([5, 3])
    return ids, lengths, ids, lengths, torch.zeros(2, dtype=torch.int64)


def images(config):
    size = config.model.image_size
    x = torch.randn(2, config.model.num_channels, size, size, dtype=torch.float64)
    labels = torch.tensor([0, 1])
    return x, labels, labels, torch.ones(2, dtype=torch.float64)


FAMILIES = known(
    {
        "gpt": ("gpt-moe-test", text),
        "seq2seq": ("translate-test", translations),
        "swin": ("swin-test", images),
    }
)
OF_EXPERTS = {
    "gumbel noise": {"router_noise": "gumbel"},
    "gaussian noise": {"router_noise": "gaussian", "router_noise_std": 3.0},
    "jitter": {"input_jitter": 0.5},
    "dropout of the router": {"input_dropout": 0.5},
    "masked outputs": {"expert_output_masking": 0.5},
    "a capacity of training": {"capacity_factor": 0.1, "min_capacity": 0},
    "losses of routers": {"aux_loss_weight": 9.0, "z_loss_weight": 9.0},
}
TERMS = {
    **{
        f"{family}: {name}": (family, {f"model.moe.{k}": v for k, v in options.items()})
        for family in FAMILIES
        for name, options in OF_EXPERTS.items()
    },
    **known(
        {
            "seq2seq: smoothed labels": ("seq2seq", {"model.label_smoothing": 0.5}),
            "seq2seq: dropout": ("seq2seq", {"model.dropout": 0.5}),
            "swin: smoothed labels": ("swin", {"model.label_smoothing": 0.5}),
            "swin: stochastic depth": ("swin", {"model.drop_path": 0.5}),
        }
    ),
}


@pytest.fixture(scope="module")
def plain():
    """What each family measures without any of them."""
    return {name: measured(name, {"model.label_smoothing": 0.0} if name != "gpt" else {}) for name in FAMILIES}


def measured(family, options):
    name, batch_of = FAMILIES[family]
    task = find_family(family).open_task(recipe(name, options))
    task._directions = ("de-en",)
    model = task.builder.build(device="cpu", dtype=torch.float64).train()
    torch.manual_seed(1)
    data = types.SimpleNamespace(validation=lambda *_: [batch_of(task.config)])
    found = evaluate(task, model, data, batch_size=2, max_samples=None, precision=PRECISION)
    assert model.training
    return found


@pytest.mark.parametrize("name", TERMS)
def test_an_evaluation_has_none(plain, name):
    family, options = TERMS[name]
    assert measured(family, options) == plain[family]


def test_a_teacher_says_nothing_in_an_evaluation(plain):
    name = FAMILIES["gpt"][0]
    task = GPTTask(recipe(name))
    task.teacher = GPTTask(recipe(name)).builder.build(device="cpu", dtype=torch.float64)
    task.teacher.register_forward_pre_hook(lambda *_: pytest.fail("the teacher was asked"))
    model = task.builder.build(device="cpu", dtype=torch.float64)
    data = types.SimpleNamespace(validation=lambda *_: [text(task.config)])
    found = evaluate(task, model, data, batch_size=2, max_samples=None, precision=PRECISION)
    assert found == plain["gpt"]
