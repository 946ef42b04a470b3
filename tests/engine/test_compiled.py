"""Steps in compiled pieces against the model as it is: every router, every number of tokens, and what goes wrong."""

import copy

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.oracle.numerics import assert_two_times

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError

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


def assert_as_exact_as(model, engine):
    """Answers that only compiled steps compute, against the model's full passes."""
    wide, dtype = copy.deepcopy(model).double(), model.embedding.weight.dtype
    own, engine._runner.model = engine._runner.model, None  # nothing else computes
    for output in answers(engine):
        ids = torch.tensor([[*output.prompt_ids, *output.token_ids]])
        with torch.no_grad():
            plain, oracle = (m(ids).logits_BSV[0, :-1] for m in (model, wide))
        rows = slice(len(output.prompt_ids) - 1, None)
        exact, chosen = oracle[rows].log_softmax(-1), torch.tensor(output.token_ids)[:, None]
        assert_two_times(
            torch.tensor([one.logprob for one in output.logprobs]),
            plain.float()[rows].log_softmax(-1).gather(1, chosen)[:, 0],
            exact.gather(1, chosen)[:, 0],
            what="logprobs",
            dtype=dtype,
            scale=float(oracle.abs().max()),
        )
    engine._runner.model = own


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
    assert not engine._runner.compiled.problem
    assert_as_exact_as(model, engine)
    before = model.embedding.weight.clone()
    engine.update_weights({name: t * 1.5 for name, t in model.state_dict().items()})
    assert torch.equal(model.embedding.weight, before * 1.5)
    assert_as_exact_as(model, engine)


def test_a_step_goes_on_where_nothing_can_be_compiled():
    model = gpt(torch.float32, moe={"top_k": 2})
    engine, plain = Engine(model, compile=True), Engine(model, compile=False)
    engine._runner.compiled._copy.layers = None  # what is traced fails
    for _ in range(4):
        assert [o.token_ids for o in answers(engine)] == [o.token_ids for o in answers(plain)]
    engine._runner.compiled._worker.join()
    assert "layers" in engine._runner.compiled.problem
    engine._runner.compiled.problem = ""
    engine.warm_up()
    assert "layers" in engine._runner.compiled.problem


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
    assert Engine(gpt(torch.float32))._runner.compiled is None, "small models gain too little"
