"""Whatever is wrong is said in one line, and the request beside it is answered as if nothing had happened."""

import numpy as np
import pytest
import torch
from tests.engine.test_engine import GREEDY, VOCAB, alone, gpt

from expertmesh.config.engine import EngineConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError

PROMPT = [5, 6, 7]


def adding(prompt, **params):
    """A request."""
    return lambda engine: engine.add(prompt, SamplingParams(**params))


def drawing(**params):
    return adding([1], **params)


def making(*args, **options):
    """Another engine for the same model."""
    return lambda engine: Engine(engine.model, *args, **options)


def updating(change):
    """New weights, which `change` has spoilt."""

    def update(engine):
        state = {name: torch.full_like(t, 9.0) for name, t in engine.model.state_dict().items()}
        engine.update_weights(change(state))

    return update


def generating(prompts, params=None):
    return lambda engine: engine.generate(prompts, params)


PROMPTS = {
    "empty": (adding([]), "is empty"),
    "empty text": (adding(""), "has no tokenizer"),
    "none": (adding(None), "prompt is a NoneType; it must be a text, or a list of token ids"),
    "a number": (adding(5), "prompt is an int"),
    "bytes": (adding(b"ab"), "prompt is a bytes"),
    "a dictionary": (adding({1: 2}), "prompt is a dict"),
    "a set": (adding({1, 2}), "prompt is a set"),
    "a list of lists": (adding([[1]]), "must be a whole number from 0 to 63"),
    "a matrix": (adding(torch.ones(2, 2, dtype=torch.int64)), r"Tensor of shape \(2, 2\)"),
    "an array of fractions": (adding(np.ones(3)), "must be a whole number from 0 to 63"),
    "a tensor of fractions": (adding(torch.ones(3)), "must be a whole number from 0 to 63"),
    "true": (adding([True]), "token id True"),
    "text among ids": (adding([1, "2"]), "token id '2'"),
    "an id too large": (adding([VOCAB]), "token id 64"),
    "an id far too large": (adding([10**90]), "token id an int"),
    "a negative id": (adding([-1]), "token id -1"),
    "longer than the model": (adding([1] * 64), "must be shorter than"),
    "no room for the answer": (adding([1] * 45, max_tokens=9), "ask for at most 4"),
    "no room for a huge answer": (adding([1], max_tokens=10**30), "ask for at most 48"),
    "longer than the cache": (adding([1] * 40, max_tokens=20), "the cache holds 48 tokens"),
    "a tensor without a list": (generating(torch.tensor(5)), "prompts is a Tensor"),
    "no list of prompts": (generating(None), "prompts is a NoneType"),
    "one of several": (generating([[1], None]), "prompt is a NoneType"),
    "one of several too large": (generating([[1], [2], [99]]), "token id 99"),
}
PARAMS = {
    "another type": (lambda engine: engine.add([1], {"n": 2}), "params is a dict"),
    "text": (generating([[1]], "greedy"), "params is a str"),
    "too many": (generating([[1]], [GREEDY] * 2), "2 for 1 prompts"),
    "one of another type": (generating([[1]], [{}]), "params is a dict"),
    "unknown": (lambda _: SamplingParams(beams=3), "beams=3: unknown option; known here: temp"),
    "no answer": (drawing(n=0), "n=0"),
    "a billion answers": (drawing(n=10**9), "must be at most 1,024; for example 1"),
    "no tokens": (drawing(max_tokens=0), "max_tokens"),
    "a negative budget": (drawing(max_tokens=-4), "max_tokens"),
    "a fraction of tokens": (drawing(max_tokens=3.5), "must be a whole number"),
    "more at least than at most": (drawing(min_tokens=5, max_tokens=4), "min_tokens"),
    "negative temperature": (drawing(temperature=-1.0), "temperature"),
    "temperature that is no number": (drawing(temperature=float("nan")), "temperature"),
    "infinite temperature": (drawing(temperature=float("inf")), "temperature"),
    "top_k of 0": (drawing(top_k=0), "top_k"),
    "top_k beyond 64 bits": (drawing(top_k=2**63), "top_k"),
    "seed beyond 64 bits": (drawing(seed=2**63), "seed"),
    "top_p of 0": (drawing(top_p=0.0), "top_p"),
    "min_p above 1": (drawing(min_p=1.5), "min_p"),
    "penalty": (drawing(presence_penalty=3), "presence_penalty"),
    "repetition penalty": (drawing(repetition_penalty=0), "repetition_penalty"),
    "repetition penalty near 0": (
        drawing(repetition_penalty=1e-320),
        "must be at least 0.01; for example",
    ),
    "no token before min_tokens": (
        drawing(min_tokens=2, stop_token_ids=range(VOCAB)),
        "min_tokens=2: all 64 tokens of the model are end tokens",
    ),
    "bias of another model": (drawing(logit_bias={VOCAB: 1.0}), "logit_bias: token id 64"),
    "bias that is no number": (drawing(logit_bias={1: float("nan")}), "logit_bias"),
    "bias as a list": (drawing(logit_bias=[1]), "must be numbers by token id"),
    "bias of a word": (drawing(logit_bias={"the": 1}), "must be a token id"),
    "stop without a tokenizer": (drawing(stop="a"), "use stop_token_ids"),
    "stop of 10,000 characters": (drawing(stop="x" * 10_000), "1 to 1024 characters"),
    "empty stop": (drawing(stop=["a", ""]), "1 to 1024 characters"),
    "stop that is a number": (drawing(stop=5), "must be a string, or several"),
    "no stop": (drawing(stop=None), "must be a string, or several"),
    "many stops": (drawing(stop=["a"] * 100), "at most 64"),
    "stop id of another model": (drawing(stop_token_ids=[VOCAB]), "stop_token_ids: token id 64"),
    "one stop id": (drawing(stop_token_ids=5), "must be a list of token ids"),
    "a tensor of one stop id": (drawing(stop_token_ids=torch.tensor(5)), "a list of token ids"),
    "switch": (drawing(ignore_eos="no"), "must be True or False"),
    "many logprobs": (drawing(logprobs=1000), "logprobs"),
    "prompt logprobs": (drawing(prompt_logprobs=-1), "prompt_logprobs"),
    "a name twice": (lambda engine: engine.add([1], request_id="good"), "still being answered"),
    "a name that is none": (lambda engine: engine.add([1], request_id=[]), "request_id is a list"),
}
WEIGHTS = {
    "no mapping": (updating(lambda state: list(state.values())), "state is a list"),
    "no tensor": (updating(lambda state: state | {"final_norm.weight": 3}), "give a tensor"),
    "unknown": (updating(lambda state: state | {"no.such": torch.zeros(1)}), "no such tensor"),
    "numbers of a quantised tensor": (
        updating(lambda state: state | {"final_norm.weight": torch.ones(24).to(torch.int8)}),
        "has dtype torch.int8; it must be torch.float64",
    ),
    "complex": (
        updating(lambda state: state | {"final_norm.weight": torch.ones(24) * 1j}),
        "has dtype torch.complex64",
    ),
    "without numbers": (
        updating(lambda state: state | {"final_norm.weight": torch.ones(24, device="meta")}),
        "is on meta, without numbers; give a tensor",
    ),
    "sparse": (
        updating(lambda state: state | {"final_norm.weight": torch.ones(24).to_sparse()}),
        "is a sparse_coo tensor; it must be a dense one",
    ),
    "another shape": (
        updating(lambda state: state | {"final_norm.weight": torch.zeros(5)}),
        r"has shape \(5,\); it must be \(24,\) as the model's",
    ),
}
ENGINES = {
    "unknown option": (making(blocks=3), "blocks"),
    "no blocks": (making(num_blocks=0), "num_blocks"),
    "too many blocks": (making(num_blocks=10**12), "no memory for as many blocks"),
    "a negative budget": (making(token_budget=-1), "token_budget"),
    "no sequences": (making(max_sequences=0), "max_sequences"),
    "more tokens than places": (making(max_len=10**6), "max_len=1000000: .* max_seq_len=64"),
    "huge blocks": (making(block_size=9999), "block_size"),
    "config and options": (making(config=EngineConfig(), num_blocks=3), "beside config"),
    "config of another type": (making(config={"num_blocks": 3}), "config is a dict"),
    "tokenizer of another type": (making("tokenizer.json"), "tokenizer is a str"),
    "end of another model": (making(end_ids=[VOCAB]), "end_ids: token id 64"),
    "one end": (making(end_ids=5), "end_ids is an int; it must be a list of token ids"),
    "bits of a model without them": (making(deterministic=True), "batch_invariant=True"),
    "device of a model": (making(device="cpu"), "is for a folder"),
    "no model": (lambda _: Engine(None), "the engine serves a GPT"),
    "no folder": (lambda _: Engine("no/such/folder"), "does not exist"),
}
CASES = {
    f"{kind}: {name}": case
    for kind, table in {
        "prompt": PROMPTS,
        "params": PARAMS,
        "weights": WEIGHTS,
        "engine": ENGINES,
    }.items()
    for name, case in table.items()
}


@pytest.fixture(scope="module")
def served():
    """A model and its answer to PROMPT; neither is changed by what is refused."""
    model = gpt()
    return model, tuple(alone(model, PROMPT, 9)[0])


def test_there_are_many_cases():
    assert len(CASES) >= 40


@pytest.mark.parametrize(("do", "line"), CASES.values(), ids=CASES)
def test_it_is_said_in_a_line_and_harms_nobody(served, do, line):
    model, expected = served
    engine = Engine(model, num_blocks=12, block_size=4)
    engine.add(PROMPT, GREEDY, request_id="good")
    engine.step()
    with pytest.raises(ConfigError, match=line) as caught:
        do(engine)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250
    assert engine.stats().num_running + engine.stats().num_waiting == 1, "nothing is left behind"
    outputs = {}
    while engine.has_work:
        outputs |= {output.request_id: output for output in engine.step()}
    assert outputs["good"].token_ids == expected and len(outputs) == 1
    assert engine.stats().num_used_blocks == 0


NUMBERS = {
    "a tensor": torch.tensor(PROMPT),
    "an array": np.array(PROMPT),
    "NumPy's integers": list(np.array(PROMPT)),
    "a list of tensors": list(torch.tensor(PROMPT)),
    "a tuple": tuple(PROMPT),
    "a generator": (i for i in PROMPT),
}


@pytest.mark.parametrize("prompt", NUMBERS.values(), ids=NUMBERS)
def test_ids_come_in_many_shapes(served, prompt):
    model, expected = served
    engine = Engine(model)
    (output,) = engine.generate(prompt, GREEDY)
    assert output.token_ids == expected
    many = engine.generate(torch.tensor([PROMPT, PROMPT]), GREEDY)
    assert [one.token_ids for one in many] == [expected] * 2
