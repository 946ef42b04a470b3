"""Compiled steps against the model as it is: the same bits for every router, every number of tokens, and what goes
wrong."""

import copy
import subprocess
import sys
import threading

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.oracle.numerics import assert_two_times_rms
from torch._subclasses import FakeTensorMode

from expertmesh.config.engine import EngineConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.faster_forward import faster_forward
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.ops import native_linear
from expertmesh.ops.cpu.compiled_loops import while_tracing
from expertmesh.ops.plain_call import runs_plainly

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
    """With neighbours, and one alone, which is another kind of step."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
    found = engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params)
    return [(one.token_ids, one.logprobs) for one in found]


def compiled_answers(engine):
    """Answers that only compiled steps compute."""
    own, engine._runner.model = engine._runner.model, None
    try:
        return answers(engine)
    finally:
        engine._runner.model = own


def is_exact(dtype, mode):
    """Whether steps have one order of sums: in deterministic mode, and where the kernels in C are the only way."""
    weight = torch.empty(0, dtype=dtype)
    return mode == "deterministic" or native_linear.is_only_way(weight)


@pytest.mark.parametrize("mode", ["deterministic", "ordinary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_have_the_models_own_bits_and_see_new_weights(kind, dtype, mode):
    sizes = {"dim": 32, "head_dim": 8, "batch_invariant": mode == "deterministic"}
    model = gpt(dtype, **sizes, **KINDS[kind])
    options = {"token_budget": 9, "deterministic": mode == "deterministic"}
    engine, plain = (Engine(model, compile=own, **options) for own in (True, False))
    engine.warm_up()
    assert not engine._runner.faster.problem
    draws = []
    for seed in (1, 2, 3):
        engine.update_weights(GPT(model.config, dtype=dtype, seed=seed).state_dict())
        found = compiled_answers(engine)
        if is_exact(dtype, mode):
            assert found == answers(plain)
        draws.append(log_probabilities(model, found))
    # of one draw's few numbers, how far off they are is luck
    assert_two_times_rms(*zip(*draws, strict=True), what="logprobs", dtype=dtype)


def log_probabilities(model, found):
    """Log-probabilities of answers: theirs, of the model's full passes, and of passes in FP64."""
    wide = copy.deepcopy(model).double()
    theirs, plain, exact = [], [], []
    for prompt, (token_ids, logprobs) in zip([*PROMPTS, PROMPTS[0]], found, strict=True):
        ids = torch.tensor([[*prompt, *token_ids]])
        rows = slice(len(prompt) - 1, None)
        chosen = torch.tensor(token_ids)[:, None]
        for passes, of in ((plain, model), (exact, wide)):
            with torch.no_grad():
                logits_SV = of(ids).logits_BSV[0, :-1][rows]
            passes.append(logits_SV.double().log_softmax(-1).gather(1, chosen)[:, 0])
        theirs.append(torch.tensor([one.logprob for one in logprobs]))
    return [torch.cat(of) for of in (theirs, plain, exact)]


@pytest.mark.parametrize("mode", ["deterministic", "ordinary"])
def test_compiled_steps_know_quantised_experts(mode):
    sizes = {"dim": 32, "head_dim": 8, "batch_invariant": mode == "deterministic"}
    dtype = torch.float32 if mode == "deterministic" else torch.bfloat16
    model = gpt(dtype, moe={"top_k": 2, "hidden_dim": 32}, **sizes)
    for layer, format in zip(model.layers, FORMATS, strict=False):
        layer.moe.experts.convert(format, group_size=16)
    options = {"deterministic": mode == "deterministic"}
    engine, plain = (Engine(model, compile=own, **options) for own in (True, False))
    engine.warm_up()
    assert not engine._runner.faster.problem
    for (ids, found), (own, expected) in zip(compiled_answers(engine), answers(plain), strict=True):
        assert ids == own
        assert found == expected or not is_exact(dtype, mode)


def test_a_step_goes_on_where_nothing_can_be_compiled():
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = Engine(model, compile=True), Engine(model, compile=False)
    engine._runner.faster._copy.layers = None  # what is traced fails
    for _ in range(4):
        assert [one for one, _ in answers(engine)] == [one for one, _ in answers(plain)]
    engine._runner.faster._worker.join()
    assert "layers" in engine._runner.faster.problem
    engine._runner.faster.problem = ""
    engine.warm_up()
    assert "layers" in engine._runner.faster.problem


def test_what_cannot_be_compiled_is_refused():
    hooked = gpt(torch.float32)
    hooked.layers[0].register_forward_hook(lambda *args: None)
    with pytest.raises(ConfigError, match="no hook"):
        Engine(hooked, compile=True)
    adapted = gpt(torch.float32)
    adapted.layers[1].moe.experts.adapters = object()
    with pytest.raises(ConfigError, match="without adapters"):
        Engine(adapted, compile=True)
    assert Engine(gpt(torch.float32))._runner.faster is None, "small models gain too little"


def test_without_the_optional_package_the_model_computes():
    model = gpt(torch.float32, moe={"top_k": 2})
    without = {"optional": "no_such_package", "known": ()}
    assert faster_forward(model, EngineConfig(), **without) is None
    with pytest.raises(ConfigError, match="compile=True: needs the package no_such_package"):
        faster_forward(model, EngineConfig(compile=True), **without)


def test_a_trace_imports_no_compiler():
    """Its import takes longer than the trace, and steps wait for both."""
    code = """
import sys
from expertmesh.ops.cpu.compiled_loops import while_tracing
with while_tracing():
    assert "torch._inductor.compile_fx" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_a_trace_in_another_thread_leaves_calls_plain():
    """Else a step's bits would depend on what is compiled meanwhile."""
    began, may_end = threading.Event(), threading.Event()

    def trace():
        with while_tracing(), FakeTensorMode():
            began.set()
            may_end.wait(60)

    worker = threading.Thread(target=trace)
    worker.start()
    try:
        assert began.wait(60)
        with torch.no_grad():
            assert runs_plainly(torch.zeros(2))
    finally:
        may_end.set()
        worker.join()
    given = torch.zeros(2)
    with FakeTensorMode():
        assert not runs_plainly(given)
