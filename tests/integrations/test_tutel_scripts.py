"""Ten scripts of the form of Tutel's examples on one process and on two ranks, beside its formulas in plain PyTorch."""

import runpy
from pathlib import Path

import pytest
import torch
from tests.support.parents.steps import D, drawn_ffn, of_ranks, plain_losses

SCRIPTS = Path(__file__).parents[1] / "support" / "parents" / "scripts"
EQUAL, IN_BF16 = 1e-5, 3e-2


def linear(function):
    """One rank's two experts, of a matrix each."""

    def draw():
        return [((w,), lambda x, w=w: function(x @ w)) for w in drawn_matrices(2)]

    return draw


def drawn_matrices(count):
    whole = 0.1 * torch.randn(count, D, D)
    return [w.clone().requires_grad_() for w in whole]


def sliced(ranks):
    """One expert, of which every rank has drawn an equal part."""
    parts = of_ranks(ranks, lambda: [0.1 * torch.randn(D * D // ranks)])
    w = torch.cat(parts).view(D, D).requires_grad_()
    return [((w,), lambda x: x @ w)]


def squared(x):
    return torch.relu(x) ** 2


def tanh_scores(x, w):
    return torch.tanh(x @ w.T)


EXPECTED = {
    "helloworld": (lambda n: of_ranks(n, drawn_ffn), {"l_aux_wt": 0.1}, EQUAL),
    "helloworld_ddp": (lambda n: of_ranks(n, drawn_ffn), {}, EQUAL),
    "helloworld_ddp_tutel": (lambda n: of_ranks(n, drawn_ffn), {}, EQUAL),
    "helloworld_amp": (lambda n: of_ranks(n, drawn_ffn), {}, IN_BF16),
    "helloworld_switch": (lambda n: of_ranks(n, drawn_ffn), {"factor": 0}, EQUAL),
    "helloworld_custom_gate_expert": (
        lambda n: of_ranks(n, linear(squared)),
        {"k": 1, "factor": 1.0, "score": tanh_scores},
        EQUAL,
    ),
    "helloworld_custom_expert_sharded": (sliced, {"k": 1}, EQUAL),
    "helloworld_from_scratch": (lambda n: of_ranks(n, linear(torch.relu)), {"factor": 0}, EQUAL),
}
"""Experts of so many ranks, the options of the layer, and how far losses may differ."""
IMAGES = ["moe_mnist", "moe_cifar10"]


def losses(name):
    return runpy.run_path(str(SCRIPTS / f"{name}.py"))["losses"]


def run(name, ranks, pool):
    torch.manual_seed(0)
    return [losses(name)] if ranks == 1 else pool.run(losses, name)


def test_every_script_is_run():
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {*EXPECTED, *IMAGES}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", EXPECTED)
def test_losses_are_those_of_tutels_formulas(name, ranks, two_ranks):
    experts, options, tolerance = EXPECTED[name]
    expected = plain_losses(ranks, experts(ranks), **options)
    assert expected[0] - expected[-1] > 100 * EQUAL, "nothing is learned"
    for found in run(name, ranks, two_ranks):
        assert found == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", IMAGES)
def test_images_are_learned(name, ranks, two_ranks):
    for found in run(name, ranks, two_ranks):
        assert len(found) == 10 and found[-1] < 0.9 * found[0]
