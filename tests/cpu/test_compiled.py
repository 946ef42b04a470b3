"""Steps in compiled pieces against the model as it is: every router, every number of tokens, and what goes wrong."""

import copy

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.oracle.numerics import assert_two_times_rms

from expertmesh.config.engine import EngineConfig
from expertmesh.cpu.compiled import CompiledForward
from expertmesh.engine.engine import Engine
from expertmesh.engine.faster_forward import faster_forward
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT

KINDS = {
    "softmax": (torch.bfloat16, {"moe": {"top_k": 2}}),
    "sigmoid and shared": (
        torch.float32,
        {"moe": {**ROUTERS["sigmoid"], **ROUTERS["shared"], "top_k": 1}},
    ),
    "hash, pyramid, residual, biases": (
        torch.bfloat16,
        {
            "moe": {**ROUTERS["residual"], **ROUTERS["hash"], **ROUTERS["pyramid"]},
            "qkv_bias": True,
            "tie_embeddings": True,
        },
    ),
}


def answers(engine):
    """With neighbours, and one alone, which is another kind of step."""
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True)
    return engine.generate(PROMPTS, params) + engine.generate(PROMPTS[:1], params)


def log_probabilities(model, engine):
    """Log-probabilities of answers that only compiled steps compute: theirs, of the model's full passes, in FP64."""
    wide = copy.deepcopy(model).double()
    own, engine._runner.model = engine._runner.model, None  # nothing else computes
    found, plain, exact = [], [], []
    for output in answers(engine):
        ids = torch.tensor([[*output.prompt_ids, *output.token_ids]])
        rows = slice(len(output.prompt_ids) - 1, None)
        chosen = torch.tensor(output.token_ids)[:, None]
        for passes, of in ((plain, model), (exact, wide)):
            with torch.no_grad():
                logits_SV = of(ids).logits_BSV[0, :-1][rows]
            passes.append(logits_SV.double().log_softmax(-1).gather(1, chosen)[:, 0])
        found.append(torch.tensor([one.logprob for one in output.logprobs]))
    engine._runner.model = own
    return [torch.cat(of) for of in (found, plain, exact)]


# Each kind is most of a minute's work of a compiler.
OF_EACH_RUN = ("sigmoid and shared", "hash, pyramid, residual, biases")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param(*kind, id=name, marks=() if name in OF_EACH_RUN else pytest.mark.exhaustive)
        for name, kind in KINDS.items()
    ],
)
def test_compiled_steps_are_the_models_own_and_see_new_weights(dtype, kind):
    model = gpt(dtype, **{"dim": 32, "head_dim": 8, **kind})
    engine = Engine(model, compile=True, token_budget=9)
    engine.warm_up()
    assert not engine._runner.faster.problem
    draws = [log_probabilities(model, engine)]
    # Of one draw's few numbers, how far off they are is luck: four sets of weights, all taken together.
    for seed in (2, 3, 4):
        new = GPT(model.config, dtype=dtype, seed=seed).state_dict()
        engine.update_weights(new)
        assert torch.equal(model.embedding.weight, new["embedding.weight"])
        draws.append(log_probabilities(model, engine))
    assert_two_times_rms(*zip(*draws, strict=True), what="logprobs", dtype=dtype)


def test_compiled_steps_know_quantised_experts():
    model = gpt(torch.float32, dim=32, head_dim=8, moe={"top_k": 2, "hidden_dim": 32})
    forms = iter(("int8", "int4", "fp8"))
    for layer in model.layers:
        layer.moe.experts.convert(next(forms), group_size=16)
    engine, plain = Engine(model, compile=True), Engine(model, compile=False)
    # how pieces are cut is tested here, not their compiler
    engine._runner.faster = CompiledForward(model, compile_piece=lambda piece, given: piece)
    engine.warm_up()
    assert not engine._runner.faster.problem
    own, engine._runner.model = engine._runner.model, None  # nothing else computes
    found = answers(engine)
    engine._runner.model = own
    for one, other in zip(found, answers(plain), strict=True):
        assert one.token_ids == other.token_ids
        pairs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 1e-5


def test_a_step_goes_on_where_nothing_can_be_compiled():
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = Engine(model, compile=True), Engine(model, compile=False)
    engine._runner.faster._copy.layers = None  # what is traced fails
    for _ in range(4):
        assert [o.token_ids for o in answers(engine)] == [o.token_ids for o in answers(plain)]
    engine._runner.faster._worker.join()
    assert "layers" in engine._runner.faster.problem
    engine._runner.faster.problem = ""
    engine.warm_up()
    assert "layers" in engine._runner.faster.problem


def test_what_cannot_be_compiled_is_refused():
    for options, line in (
        ({"compile": True, "deterministic": True}, "compile=True: changes bits"),
        ({"compile": True}, "is for models in float32"),
    ):
        with pytest.raises(ConfigError, match=line):
            Engine(gpt(torch.float64, batch_invariant="deterministic" in options), **options)
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
