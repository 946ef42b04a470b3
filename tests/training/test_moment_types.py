"""Moments in few bytes: what each type makes of them, words that go by name, step and place, runs that go on to the
bit."""

import copy
import re
from pathlib import Path

import pytest
import torch
from tests.oracle.numerics import TWO
from tests.support.rank_memory import memory_of_rank
from tests.support.runs import lines_of
from torch import nn

from expertmesh.checkpoints.store import list_checkpoints
from expertmesh.config.run import OptimConfig, ParallelConfig
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.parallel.shard_place import Place
from expertmesh.spec.moments import block_size, moment_bytes
from expertmesh.training.moment_types import CODES, read_moment, write_moment
from expertmesh.training.optim import build_optimizer
from expertmesh.training.state import RunProgress, TrainState
from expertmesh.training.stochastic_rounding import WordTables
from expertmesh.training.workspace import Workspace

TYPES = ("bfloat16", "int8", "fp16-scaled")
CPU = torch.device("cpu")
SHAPE = (40, 150)
"""Two whole blocks, and one that is shorter."""
MOMENTS = "exp_avg", "exp_avg_sq"


def drawn(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def outliers():
    x = 1e-6 * drawn()
    x[:, 7] = 3e4
    return x


CASES = {
    "normal": drawn,
    "rows and columns of other sizes": lambda: (
        drawn() * torch.logspace(0, -6, 40)[:, None] * torch.logspace(0, -2, 150)
    ),
    "zeros": lambda: torch.zeros(SHAPE),
    "rows of zeros": lambda: drawn() * (torch.arange(40) % 2)[:, None],
    "denormal": lambda: 1e-40 * drawn(),
    "one large value in each row": outliers,
}


def words_of(step, name="w", place=None):
    place = place or Place(SHAPE, (0, 0), SHAPE)
    return WordTables(step, [(place, CPU)]).words(name, place, CPU)


def half_step(values, state_dtype, *, signed):
    """The most that rounding to the nearest number of a type changes each value, from the numbers themselves."""
    x = values.double().abs()
    if state_dtype == "bfloat16":
        exponent = x.clamp_min(2.0**-126).log2().floor()
        return 2.0 ** (exponent - 8)
    if state_dtype == "fp16-scaled":
        scale = (x.max() / 65504).clamp_min(2.0**-126)
        return scale * 2.0 ** ((x / scale).clamp_min(2.0**-14).log2().floor() - 11)
    levels, power = (127, 4) if signed else (255, 8)
    size = block_size(values.shape[1])
    largest = torch.stack([b.amax(1) for b in x.split(size, 1)], 1)
    largest = largest.repeat_interleave(size, 1)[:, : values.shape[1]].clamp_min(1e-300)
    below = (levels * (x / largest) ** (1 / power)).floor().clamp_max(levels - 1)
    return largest * (((below + 1) / levels) ** power - (below / levels) ** power) / 2


def rounded(values, state_dtype, words, *, key):
    code = CODES[state_dtype](values.shape[1])
    state = code.new(values, key)
    if state_dtype == "fp16-scaled":
        code.next_scale(state[f"{key}_scale"], 0.0, values.abs().max())
    write_moment(code, state, key, values, words, Workspace(CPU))
    return read_moment(code, state, key, torch.float32, Workspace(CPU)), state


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("state_dtype", TYPES)
@pytest.mark.parametrize("key", MOMENTS)
def test_a_moment_is_off_by_twice_the_nearest_at_most(state_dtype, key, case):
    """The two-times rule, element by element: a word may choose the farther one of two neighbours."""
    values = CASES[case]()
    values = values if key == "exp_avg" else values.square()
    bound = half_step(values, state_dtype, signed=key == "exp_avg")
    before = values.clone()
    for step in range(3):
        found, _ = rounded(values, state_dtype, words_of(step), key=key)
        error = (found.double() - values.double()).abs()
        assert torch.isfinite(found).all()
        tiny = 2.0**-149 + 1e-6 * (values.double().abs() + bound)  # of the arithmetic in FP32
        assert (error <= TWO * bound + TWO * tiny).all(), (error - TWO * bound).max()
        assert not found[(values == 0) & (bound == 0)].any()
        if key == "exp_avg_sq" and state_dtype != "bfloat16":
            assert (found[values > 1e-30] > 0).all()  # or the next step would divide by it
    assert torch.equal(values, before)


@pytest.mark.parametrize("state_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("key", MOMENTS)
def test_the_mean_of_many_steps_is_the_value(state_dtype, key):
    values = drawn() if key == "exp_avg" else drawn().square()
    total, count = torch.zeros(SHAPE, dtype=torch.float64), 400
    for step in range(count):
        total += rounded(values, state_dtype, words_of(step), key=key)[0]
    bound = TWO * half_step(values, state_dtype, signed=key == "exp_avg")
    # by Hoeffding's inequality a mean of 400 is off by 0.2 of a step with a probability of 2e-14
    assert ((total / count - values).abs() <= 0.2 * bound + 1e-6 * values.abs()).all()


@pytest.mark.parametrize("state_dtype", TYPES)
def test_what_is_not_finite_is_not_hidden(state_dtype):
    for bad in (float("nan"), float("inf")):
        values = drawn()
        values[3, 5] = bad
        values.view(torch.int32)[4, 6] = 0x7FFFFFFF  # the NaN of GPUs, whose bits are all ones
        found, _ = rounded(values, state_dtype, words_of(1), key="exp_avg")
        assert not found[3, 5].isfinite() and not found[4, 6].isfinite()
        if state_dtype != "fp16-scaled":  # one scale for all
            assert found[5:].isfinite().all()


def test_words_go_by_name_step_and_place():
    def table(words):
        return words.of(slice(None), Workspace(CPU)).clone()

    whole = table(words_of(5))
    part = Place(SHAPE, (10, 30), (7, 50))
    assert torch.equal(table(words_of(5, place=part)), whole[10:17, 30:80])
    cube = Place((4, 10, 150), (2, 3, 0), (2, 4, 150))
    rows_of = [row for e in (2, 3) for row in range(10 * e + 3, 10 * e + 7)]
    assert torch.equal(table(words_of(5, place=cube)), whole[rows_of])
    for other in (words_of(6), words_of(5, "v")):
        assert (table(other) == whole).float().mean() < 0.01
    assert abs(whole.double().mean()) < 2.0**31 * 0.02  # uniform over signed words
    assert abs(whole.double().std() / 2.0**32 - 12**-0.5) < 0.01
    pairs = torch.corrcoef(torch.stack([whole.flatten()[:-1], whole.flatten()[1:]]).double())
    assert abs(pairs[0, 1]) < 0.05


def stepped(state_dtype, gradients, *, name="adamw"):
    """A matrix after some steps, and its optimizer."""
    layer = nn.Linear(150, 40, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    config = OptimConfig(name=name, lr=0.01, state_dtype=state_dtype)
    optimizer = build_optimizer(layer, config)
    for gradient in gradients:
        layer.weight.grad = gradient.clone()
        optimizer.step()
    return layer.weight, optimizer


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("state_dtype", TYPES)
def test_a_step_is_that_of_the_moments_as_they_are_kept(state_dtype, name, case):
    """To the bit: FP32's first step, and from then on FP32's step from what the moments stand for, which is twice the
    nearest off at most."""
    gradients = [CASES[case](), CASES[case]().flip(0)]
    first, optimizer = stepped(state_dtype, gradients[:1], name=name)
    plain, exact = stepped("float32", gradients[:1], name=name)
    assert torch.equal(first, plain)
    code = CODES[state_dtype](150)
    state = optimizer.state[first]
    for key in ("momentum_buffer",) if name == "muon" else MOMENTS:
        kept = read_moment(code, state, key, torch.float32, Workspace(CPU))
        bound = half_step(exact.state[plain][key], state_dtype, signed=key != "exp_avg_sq")
        tiny = 2.0**-149 + 1e-6 * (exact.state[plain][key].double().abs() + bound)
        assert ((kept - exact.state[plain][key]).abs() <= TWO * bound + TWO * tiny).all()
        exact.state[plain][key].copy_(kept)
    for weight, optim in ((first, optimizer), (plain, exact)):
        weight.grad = gradients[1].clone()
        optim.step()
    assert torch.isfinite(first).all()
    assert torch.equal(first, plain)


@pytest.mark.parametrize("state_dtype", TYPES)
def test_a_moment_without_gradients_dies_away(state_dtype):
    """To the nearest of 8 bits, 0.95 of a number would be the number itself for ever."""
    gradients = [drawn()] + [torch.zeros(SHAPE)] * 60
    weight, optimizer = stepped(state_dtype, gradients)
    code = CODES[state_dtype](150)
    plain, exact = stepped("float32", gradients)
    kept = read_moment(code, optimizer.state[weight], "exp_avg_sq", torch.float32, Workspace(CPU))
    expected = exact.state[plain]["exp_avg_sq"]
    assert 0.8 < kept.sum() / expected.sum() < 1.25


def gpt():
    return GPT(RECIPES["gpt-moe-test"]().model, seed=0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("state_dtype", TYPES)
def test_bytes_are_those_of_the_formula(state_dtype, name):
    model, config = gpt(), RECIPES["gpt-moe-test"]().model
    optimizer = build_optimizer(model, OptimConfig(name=name, state_dtype=state_dtype))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = sum(t.nbytes for s in optimizer.state.values() for k, t in s.items() if k != "step")
    expected = memory_of_rank(config, ParallelConfig(), 1, name=name, state_dtype=state_dtype)
    assert kept == expected.optimizer_bytes
    usual = memory_of_rank(config, ParallelConfig(), 1, name=name)
    assert kept < usual.optimizer_bytes * (0.35 if state_dtype == "int8" else 0.55)


def test_what_stays_in_fp32():
    for shape, part in (((5000,), (5000,)), ((63, 65), (63, 65)), ((64, 128), (64, 16))):
        expected = 4 * torch.Size(part).numel()
        assert moment_bytes(shape, part, "int8") == expected
    assert moment_bytes((64, 128), (64, 32), "int8") == 64 * 32 + 4 * 64
    assert moment_bytes((64, 64), (64, 64), "fp16-scaled") == 2 * 4096 + 4
    assert moment_bytes((64, 100), (64, 100), "int8", master=8) == 6400 + 4 * 64 * 7


def test_a_state_that_is_loaded_and_a_copy_go_on_to_the_bit():
    """`load_state_dict` of torch makes every moment one of the parameter's type."""
    for name in ("adamw", "muon"):
        for state_dtype in TYPES:
            config = OptimConfig(name=name, state_dtype=state_dtype)
            models = [gpt() for _ in range(2)]
            optimizers = [build_optimizer(model, config) for model in models]

            def step(model, optimizer):
                for index, p in enumerate(model.parameters()):
                    p.grad = torch.full_like(p, 0.1 * (index % 3))
                optimizer.step()

            step(models[0], optimizers[0])
            models[1].load_state_dict(models[0].state_dict())
            optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            third = copy.deepcopy((models[0], optimizers[0]))
            pairs = [*zip(models, optimizers, strict=True), third]
            for pair in pairs:
                step(*pair)
            for model, _ in pairs[1:]:
                for p, q in zip(model.parameters(), models[0].parameters(), strict=True):
                    assert torch.equal(p, q)


@pytest.fixture
def run_of(tiny, tmp_path):
    def make(folder, steps, **changes):
        options = {"model.dim": 64, "model.moe.hidden_dim": 32, "optim.schedule_steps": 6}
        options |= {"train.steps": steps, "train.run_dir": str(tmp_path / folder)}
        return tiny(**options, **changes)

    return make


@pytest.mark.parametrize(("name", "state_dtype"), [("muon", t) for t in TYPES] + [("adamw", "int8")])
def test_a_run_goes_on_to_the_bit(run_of, run_quietly, name, state_dtype):
    changes = {"optim.name": name, "optim.state_dtype": state_dtype}
    run_quietly(run_of("straight", 6, **changes))
    run_quietly(run_of("halves", 3, **changes))
    run_quietly(run_of("halves", 6, **changes, **{"train.resume": "required"}))
    straight, halves, plain = (
        [(line["loss"], line["grad_norm"]) for line in lines_of(run_of(n, 6).train.run_dir)]
        for n in ("straight", "halves", "straight")
    )
    assert len(straight) == 6 and straight == halves == plain
    run_quietly(run_of("fp32", 6, **{"optim.name": name}))
    others = [line["loss"] for line in lines_of(run_of("fp32", 6).train.run_dir)]
    assert others[:2] == [loss for loss, _ in straight[:2]]  # the first step is FP32's
    assert others[2:] != [loss for loss, _ in straight[2:]]


PAIRS = [
    ("float32", "int8"),
    ("int8", "bfloat16"),
    ("fp16-scaled", "int8"),
    ("int8", "fp16-scaled"),
    ("int8", "float32"),
    ("bfloat16", "float32"),
]


@pytest.mark.parametrize(("was", "now"), PAIRS)
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_checkpoint_goes_on_with_another_type(run_of, run_quietly, name, was, now):
    """One line says so, and the next step is that of the moments that were saved, to twice what the new type rounds."""
    changes = {"optim.name": name, "optim.state_dtype": was}
    run_quietly(run_of("run", 3, **changes))
    config = run_of("run", 6, **{"optim.name": name, "optim.state_dtype": now})
    path = list_checkpoints(Path(config.train.run_dir) / "checkpoints")[-1]
    states = []
    for state_dtype in (was, now):
        model = GPT(config.model, seed=0)
        optimizer = build_optimizer(model, config.optim.updated({"state_dtype": state_dtype}))
        state = TrainState(model, optimizer, torch.amp.GradScaler("cpu"), RunProgress())
        state.load(path)
        states.append(state)
    before, after = states
    assert not before.loaded
    assert re.fullmatch(rf"optimizer: moments change their type, \d+ tensors from {was} to {now}", after.loaded)
    assert values_of(before).keys() == values_of(after).keys()
    for where, old in values_of(before).items():
        new = values_of(after)[where]
        bound = torch.zeros(())
        if now != "float32" and old.ndim > 1 and old.numel() >= 4096:
            bound = half_step(old.reshape(-1, old.shape[-1]), now, signed="_sq" not in where[1])
            bound = bound.view(old.shape)
        tiny = 2.0**-149 + 1e-6 * (old.double().abs() + bound)
        assert ((new - old).abs() <= bound + tiny).all(), where  # to the nearest
    rest = config.updated({"train.resume": "required"})
    assert run_quietly(rest).step == 6


def values_of(state):
    """What all moments stand for, by parameter and name."""
    found = {}
    for name, parameter in state.model.named_parameters():
        own = state.optimizer.state[parameter]
        for key in own.keys() & {*MOMENTS, "momentum_buffer"}:
            dtype = str(own[key].dtype).removeprefix("torch.")
            dtype = {"float16": "fp16-scaled", "uint8": "int8"}.get(dtype, dtype)
            value = own[key]
            if dtype != "float32":
                code = CODES[dtype](parameter.shape[-1])
                value = read_moment(code, own, key, torch.float32, Workspace(CPU))
            found[name, key] = value.view(parameter.shape)
    return found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim.state_dtype": "int4"}, "optim.state_dtype=int4: must be .*float32.*fp16-scaled"),
        ({"optim.state_dtype": "INT8"}, "optim.state_dtype=INT8: must be"),
    ],
)
def test_an_unknown_type(changes, message):
    with pytest.raises(ConfigError, match=message):
        RECIPES["gpt-moe-test"]().updated(changes)


def test_a_model_without_a_large_tensor():
    with pytest.raises(ConfigError, match=re.escape("optim.state_dtype=int8: has no effect")):
        build_optimizer(nn.Linear(8, 8), OptimConfig(state_dtype="int8"))
