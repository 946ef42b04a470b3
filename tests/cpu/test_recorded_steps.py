"""Recorded steps against the model as it is: the same bits for every router, format and number of tokens, and what goes
wrong."""

import contextlib
import itertools
import sys

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.support.pairwise import covering
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from expertmesh import lora as em_lora
from expertmesh.cpu import recorded_steps
from expertmesh.engine.captured import OPTIONAL
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.kernels.cpu.library import loaded
from expertmesh.models.gpt.model import GPT

pytestmark = pytest.mark.skipif(loaded().kernels is None, reason="no C compiler")

KINDS = {
    "softmax": {"moe": {"top_k": 2}},
    "sigmoid and shared": {"moe": {**ROUTERS["sigmoid"], **ROUTERS["shared"], "top_k": 1}},
    "hash, pyramid, residual, biases": {
        "moe": {**ROUTERS["residual"], **ROUTERS["hash"], **ROUTERS["pyramid"]},
        "qkv_bias": True,
        "tie_embeddings": True,
    },
    "cosine, sinks, window": {
        "moe": {**ROUTERS["cosine"], "top_k": 2},
        "sinks": True,
        "sliding_window": 3,
    },
}
FORMATS = ("int8", "int4", "fp8")


def answers(engine):
    """With neighbours, one alone, and one that is drawn."""
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=0, ignore_eos=True)
    drawn = SamplingParams(temperature=0.9, seed=3, max_tokens=5, logprobs=1)
    found = engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params) + engine.generate(PROMPTS, drawn)
    return [(one.token_ids, one.logprobs) for one in found]


def assert_recorded(engine):
    """Whether steps were replayed, of one token and of several, all of them checked."""
    faster = engine._runner.faster
    assert not faster.problem
    assert {kind[0] for kind, one in faster._recorded.items() if one.is_checked} >= {1, 2}


FACTORS = {"kind": list(KINDS), "dtype": [torch.bfloat16, torch.float32], "mode": ["deterministic", "ordinary"]}
PAIRS = covering(FACTORS)


def rows():
    """Every combination; those beyond a set in which every two values meet are exhaustive."""
    for values in itertools.product(*FACTORS.values()):
        is_one = dict(zip(FACTORS, values, strict=True)) in PAIRS
        yield pytest.param(*values, marks=() if is_one else pytest.mark.exhaustive)


@pytest.mark.parametrize(tuple(FACTORS), [*rows()])
def test_recorded_steps_have_the_models_own_bits_and_see_new_weights(kind, dtype, mode):
    sizes = {"dim": 32, "head_dim": 8, "batch_invariant": mode == "deterministic"}
    model = gpt(dtype, **sizes, **KINDS[kind])
    options = {"token_budget": 9, "deterministic": mode == "deterministic"}
    engine, plain = (Engine(model, compile=own, **options) for own in (True, False))
    for seed in (1, 2):
        engine.update_weights(GPT(model.config, dtype=dtype, seed=seed).state_dict())
        assert answers(engine) == answers(plain)
        assert_recorded(engine)
    for parameter in model.parameters():  # other memory
        parameter.data = parameter.data * 0.5
    assert answers(engine) == answers(plain)


@pytest.mark.parametrize("mode", ["deterministic", "ordinary"])
def test_recorded_steps_know_quantised_experts(mode):
    sizes = {"dim": 32, "head_dim": 8, "batch_invariant": mode == "deterministic"}
    dtype = torch.float32 if mode == "deterministic" else torch.bfloat16
    model = gpt(dtype, moe={"top_k": 2, "hidden_dim": 32}, **sizes)
    for layer, format in zip(model.layers, FORMATS, strict=False):
        layer.moe.experts.convert(format, group_size=16)
    options = {"deterministic": mode == "deterministic"}
    engine, plain = (Engine(model, compile=own, **options) for own in (True, False))
    assert answers(engine) == answers(plain)


def test_guesses_are_recorded_too():
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = (Engine(model, compile=own, num_draft_tokens=3, block_size=4) for own in (True, False))
    again = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompt = [3, 4, 5, 6] * 6
    assert [engine.generate([prompt], again)[0].token_ids for _ in range(3)] == [
        plain.generate([prompt], again)[0].token_ids
    ] * 3
    assert any(kind[0] > kind[1] for kind in engine._runner.faster._recorded)


def engines_of_router(change):
    """An engine that records and one that does not; the second router of each model sees `change()(x)`."""
    engines = []
    for compile in (None, False):
        model = gpt(torch.float32, moe={"top_k": 2})
        router, own = model.layers[1].moe.router, change()
        kind = type(router)
        forward = {"forward": lambda self, x, kind=kind, own=own: kind.forward(self, own(x))}
        router.__class__ = type("Changed", (kind,), forward)
        engines.append(Engine(model, compile=compile))
    return engines


def test_a_model_that_reads_its_numbers_goes_on_unrecorded():
    engine, plain = engines_of_router(lambda: lambda x: x * (1 + x[0, 0].item()))
    assert answers(engine) == answers(plain)
    assert "the host reads" in engine._runner.faster.problem
    assert not engine._runner.faster._recorded


def test_a_replay_that_is_not_the_step_is_found():
    """A model that counts its calls: a replay would repeat the number that was recorded."""

    def counted():
        calls = itertools.count()
        return lambda x: x * next(calls)

    engine, plain = engines_of_router(counted)
    assert answers(engine) == answers(plain)
    assert "is not the step" in engine._runner.faster.problem


def test_memory_of_recorded_steps_is_bounded(threshold, caplog):
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = Engine(model), Engine(model, compile=False)
    expected = answers(plain)
    assert answers(engine) == expected
    recorded = engine._runner.faster._recorded
    sizes = [one.recording.num_bytes for one in recorded.values()]
    assert len(sizes) >= 2
    threshold(recorded_steps, "ALL_BYTES", max(sizes))
    engine = Engine(model)
    assert answers(engine) == expected
    assert sum(one.recording.num_bytes for one in engine._runner.faster._recorded.values()) <= max(sizes)
    threshold(recorded_steps, "MOST_BYTES", min(sizes) - 1)
    engine = Engine(model)
    caplog.set_level("INFO", "expertmesh.engine")
    assert answers(engine) == expected
    assert not engine._runner.faster._recorded
    assert "tokens or more are not recorded: one takes" in caplog.messages[-1]


STATES = {
    "threads": lambda: threads(torch.get_num_threads() + 1),
    "inference": torch.inference_mode,
}


@contextlib.contextmanager
def threads(num):
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_another_state_of_the_thread_is_another_kind(state):
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = Engine(model), Engine(model, compile=False)
    expected = answers(plain)
    before = {}
    for _ in range(2):
        assert answers(engine) == expected
        before = before or dict(engine._runner.faster._recorded)
        with state():
            assert answers(engine) == answers(plain)
    assert not engine._runner.faster.problem
    assert len(engine._runner.faster._recorded) >= len(before)


def hooked(model):
    model.layers[1].register_forward_hook(lambda module, args, output: None)


def wrapped(model):
    router = model.layers[1].moe.router
    router.forward = router.forward


def adapted(model):
    em_lora.add(model, rank=2)
    for name, one in model.named_parameters():
        if "adapters" in name:
            torch.nn.init.normal_(one, generator=torch.Generator().manual_seed(len(name)))


def quantised(model):
    model.layers[1].moe.experts.convert("int8")


def with_another_layer(model):
    model.layers[1].moe = GPT(model.config, dtype=torch.float32, seed=5).layers[1].moe


def with_another_epsilon(model):
    model.layers[1].attention_norm.eps = 0.5


def of_another_class(model):
    router = model.layers[1].moe.router
    router.__class__ = type(
        "Negated", (type(router),), {"forward": lambda self, x: type(self).__base__.forward(self, -x)}
    )


@pytest.mark.parametrize(
    "change",
    [hooked, wrapped, adapted, quantised, with_another_layer, with_another_epsilon, of_another_class],
)
def test_changes_of_the_model_are_seen(change):
    model = gpt(torch.float32, moe={"top_k": 2, "hidden_dim": 32}, dim=32, head_dim=8)
    engine = Engine(model)
    before = answers(engine)
    with torch.no_grad():
        change(model)
    after = answers(engine)
    assert after == answers(Engine(model, compile=False))
    assert (after == before) == (change in (hooked, wrapped))
    assert bool(engine._runner.faster.problem) == (change in (hooked, wrapped, adapted))


@contextlib.contextmanager
def counted_by_hooks(calls):
    hook = register_module_forward_hook(lambda *args: calls.append(1))
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def counted_flops(calls):
    with FlopCounterMode(display=False) as counter:
        yield
    calls.append(counter.get_total_flops())


@pytest.mark.parametrize("counted", [counted_by_hooks, counted_flops])
def test_what_watches_every_step_sees_every_step(counted):
    model = gpt(torch.float32)
    engine, plain = (Engine(model, prefix_caching=False, **how) for how in ({}, {"compile": False}))
    answers(engine)
    recorded = dict(engine._runner.faster._recorded)
    assert recorded
    seen, expected = [], []
    with counted(seen):
        answers(engine)
    with counted(expected):
        answers(plain)
    assert sum(seen) == sum(expected) > 0
    assert engine._runner.faster._recorded == recorded


def test_what_cannot_be_recorded_is_refused():
    hooked = gpt(torch.float32)
    hooked.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ConfigError, match="no hook"):
        Engine(hooked, compile=True)
    assert Engine(hooked)._runner.faster is None


def test_without_the_optional_package_the_model_computes(monkeypatch):
    model = gpt(torch.float32, moe={"top_k": 2})
    monkeypatch.setitem(sys.modules, OPTIONAL, None)
    assert Engine(model)._runner.faster is None
    with pytest.raises(ConfigError, match="compile=True: needs the package expertmesh.cpu"):
        Engine(model, compile=True)
