"""Torchao's AdamW behind `--optim.state-dtype`: what it computes and keeps, that runs go on, and where it is
refused."""

import sys

import pytest
import torch
from tests.oracle.numerics import TWO
from tests.support.runs import lines_of
from torch import nn

from expertmesh.config.run import OptimConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.ops.cpu.compiled_loops import compiler_problem
from expertmesh.spec.moments import moment_bytes
from expertmesh.training.optim import build_optimizer, set_learning_rate

TYPES = ("torchao-int8", "torchao-int4")


class Two(nn.Module):
    """A matrix that is large enough, and what is not: a bias, and a matrix that has no whole blocks."""

    def __init__(self):
        super().__init__()
        self.large, self.odd = nn.Linear(64, 64), nn.Linear(65, 67, bias=False)


def built(state_dtype, model=None, **options):
    torch.manual_seed(0)
    model = model or Two()
    return model, build_optimizer(model, OptimConfig(state_dtype=state_dtype, **options))


def stepped(model, optimizer, steps=2):
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        set_learning_rate(optimizer, 0.01 / (step + 1))
        optimizer.step()


@pytest.fixture
def torchao():
    """Skips where it is not installed, or cannot compile its step."""
    pytest.importorskip("torchao", reason="torchao not installed")
    if compiler_problem():
        pytest.skip("no C++ compiler")


@pytest.fixture
def compiled(request, torchao):
    """Whether torchao's step is compiled: for each shape one, most of a minute for a small model. Or it runs as it
    is."""
    with torch.compiler.set_stance("default" if request.param else "force_eager"):
        yield request.param


@pytest.mark.slow
@pytest.mark.parametrize(
    ("state_dtype", "compiled"),
    [
        (TYPES[0], True),
        (TYPES[1], False),
        pytest.param(TYPES[1], True, marks=pytest.mark.exhaustive),
    ],
    indirect=["compiled"],
)
def test_torchao(state_dtype, compiled):
    """The first step is FP32's, rates of the loop reach it and bytes are the formula's."""
    (model, optimizer), (plain, fp32) = built(state_dtype), built("float32")
    before = model.large.weight.detach().clone()
    stepped(model, optimizer, 1)
    stepped(plain, fp32, 1)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (p - q).abs().max() <= 16 * TWO * torch.finfo(torch.float32).eps
    for name, p in model.named_parameters():
        kept = sum(t.nbytes for t in tensors(optimizer.state[p]))
        each = moment_bytes(p.shape, p.shape, state_dtype)
        assert kept == 2 * each and (each < p.nbytes) == (name == "large.weight")
    set_learning_rate(optimizer, 0.0)
    after = model.large.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.large.weight, after) and not torch.equal(before, after)


def tensors(state):
    for key, value in state.items():
        if key != "step":
            names = ("codes", "scale", "qmap")
            yield from [getattr(value, n) for n in names] if hasattr(value, "codes") else [value]


@pytest.mark.parametrize("state_dtype", TYPES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.exhaustive)], indirect=True)
def test_a_run_goes_on_to_the_bit_with_the_same_type_only(compiled, state_dtype, tiny, tmp_path, run_quietly):

    def run_of(folder, steps, **changes):
        options = {"model.dim": 64, "model.moe.hidden_dim": 32, "optim.schedule_steps": 4}
        options |= {"train.steps": steps, "train.run_dir": str(tmp_path / folder)}
        return tiny(**options | {"optim.state_dtype": state_dtype} | changes)

    again = {"train.resume": "required"}
    run_quietly(run_of("straight", 4))
    run_quietly(run_of("halves", 2))
    with pytest.raises(ConfigError, match=f"moments of {state_dtype}, and torchao's are not conv"):
        run_quietly(run_of("halves", 4, **again | {"optim.state_dtype": "int8"}))
    run_quietly(run_of("halves", 4, **again))
    straight, halves = ([line["loss"] for line in lines_of(tmp_path / n)] for n in ("straight", "halves"))
    assert len(straight) == 4 and straight == halves


def test_muon():
    with pytest.raises(ConfigError, match="state_dtype=torchao-int8: is an AdamW.*use int8"):
        RECIPES["gpt-moe-test"]().updated({"optim.name": "muon", "optim.state_dtype": "torchao-int8"})


def double():
    return Two().double()


def spread():
    model = Two()
    model.odd.weight.device_mesh = "a mesh"
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [(double, "in float64; leave it out"), (spread, "no parameters that FSDP2 spreads; use int8")],
)
def test_parameters_that_they_do_not_take(make, message):
    with pytest.raises(ConfigError, match=message):
        built("torchao-int8", make())


def test_several_ranks():
    with pytest.raises(ConfigError, match="works on one process .*; use int8"):
        build_optimizer(Two(), OptimConfig(state_dtype="torchao-int8"), num_ranks=2)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            "ModuleNotFoundError('No module', name='torchao')",
            r"pip install 'expertmesh\[torchao\]'",
        ),
        ("ImportError('wants another torch\\nand more')", "import says: wants another torch$"),
    ],
)
def test_without_torchao(monkeypatch, tmp_path, error, message):
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "torchao.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=f"state_dtype=torchao-int8: needs torchao; .*{message}"):
        built("torchao-int8")


def test_without_a_compiler(tmp_path):
    """Refused before a step, but not where nothing is compiled."""
    pytest.importorskip("torchao", reason="torchao not installed")
    inductor, missing = torch._inductor.config, str(tmp_path / "compiler")
    with inductor.patch({"cpp.cxx": (None, missing)}):
        with pytest.raises(ConfigError, match="no C\\+\\+ compiler .*compiler.*; install g\\+\\+"):
            built("torchao-int8")
        with torch._dynamo.config.patch(disable=True):
            (model, optimizer), (plain, fp32) = built("torchao-int8"), built("float32")
            stepped(model, optimizer, 1)
            stepped(plain, fp32, 1)
    torch.testing.assert_close(model.large.weight, plain.large.weight)


def test_a_model_without_a_large_tensor(torchao):
    with pytest.raises(ConfigError, match="has no effect on this model"):
        built("torchao-int8", nn.Linear(8, 8))
