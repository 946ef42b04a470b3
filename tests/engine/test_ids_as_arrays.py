"""Token ids in any array: right, or one line."""

import numpy as np
import pytest
import torch

import expertmesh as em
from expertmesh.engine.lockstep import Lockstep
from expertmesh.errors import ConfigError

IDS = [[5, 6, 7], [8, 9, 10]]
FORMS = {
    "lists": IDS,
    "tuples": tuple(map(tuple, IDS)),
    "a tensor": torch.tensor(IDS),
    "an int32 tensor": torch.tensor(IDS, dtype=torch.int32),
    "tensors": list(map(torch.tensor, IDS)),
    "lists of scalar tensors": [[torch.tensor(i) for i in one] for one in IDS],
    "an array": np.array(IDS),
    "a uint16 array": np.array(IDS, dtype=np.uint16),
    "arrays": list(map(np.array, IDS)),
    "lists of NumPy's integers": [list(np.array(one)) for one in IDS],
    "ranges": [range(5, 8), range(8, 11)],
    "a generator": (one for one in IDS),
}
MODEL = em.GPT(em.recipe("gpt-moe-test").model, seed=0).eval()
GREEDY = em.SamplingParams(temperature=0, max_tokens=3)


def written(outputs):
    return [one.token_ids for one in outputs]


CALLS = {
    "token_logprobs": lambda ids: [one.tolist() for one in em.token_logprobs(MODEL, ids)],
    "generate": lambda ids: written(em.Engine(MODEL, num_blocks=8).generate(ids, GREEDY)),
    "lockstep": lambda ids: [one.token_ids for _, (one,) in Lockstep(MODEL).as_they_end(ids, GREEDY)],
}


@pytest.mark.parametrize("form", [name for name in FORMS if name != "a generator"])
@pytest.mark.parametrize("call", CALLS)
def test_prompts(call, form):
    assert CALLS[call](FORMS[form]) == CALLS[call](IDS)


def test_prompts_of_a_generator():
    for call in CALLS.values():
        assert call(one for one in IDS) == call(IDS)


WRONG = {
    "of three axes": torch.zeros(1, 2, 3, dtype=torch.int64),
    "without an axis": torch.tensor(5),
    "of reals": torch.tensor([[1.0, 2.0]]),
    "of truths": np.array([[True, False]]),
    "a text": "abc",
    "texts": ["abc", "de"],
    "bytes": b"abc",
    "a mapping": {1: 2},
    "a set": [{1, 2}],
    "beyond the vocabulary": [[5, 10**6]],
    "negative": torch.tensor([[-1, 2]]),
    "nothing": None,
    "a number": 5,
    "an empty one": [[], [1, 2]],
}


@pytest.mark.parametrize("given", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("call", CALLS)
def test_wrong_prompts_are_one_line(call, given):
    with pytest.raises(ConfigError) as caught:
        CALLS[call](given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


PARAMS = {
    "tensor": {"stop_token_ids": torch.tensor([3, 4])},
    "array": {"stop_token_ids": np.array([3, 4])},
    "range": {"stop_token_ids": range(3, 5)},
    "set": {"stop_token_ids": {4, 3}},
    "scalars": {"stop_token_ids": [torch.tensor(3), np.int64(4)]},
    "generator": {"stop_token_ids": (i for i in (3, 4))},
}


@pytest.mark.parametrize("given", PARAMS.values(), ids=PARAMS)
def test_stop_token_ids(given):
    assert em.SamplingParams(**given) == em.SamplingParams(stop_token_ids=(3, 4))


def test_logit_bias():
    expected = em.SamplingParams(logit_bias={3: 1.5, 4: -2.0})
    for keys in (np.array([3, 4]), torch.tensor([3, 4]), [np.int8(3), torch.tensor(4)]):
        for values in ([1.5, -2.0], np.array([1.5, -2.0]), torch.tensor([1.5, -2.0])):
            given = dict(zip(keys, values, strict=True))
            assert em.SamplingParams(logit_bias=given) == expected


WRONG_PARAMS = {
    "ids are text": ({"stop_token_ids": "34"}, "stop_token_ids"),
    "ids are bytes": ({"stop_token_ids": b"34"}, "stop_token_ids"),
    "ids of two axes": ({"stop_token_ids": torch.zeros(2, 2, dtype=torch.int64)}, "stop_token_ids"),
    "real ids": ({"stop_token_ids": torch.tensor([1.5])}, "must be a token id"),
    "one token twice": ({"logit_bias": {3: 1.0, torch.tensor(3): 2.0}}, "two numbers for one"),
    "biases as a tensor": ({"logit_bias": torch.zeros(2, 9)}, "logit_bias"),
    "a tensor for a number": ({"temperature": torch.zeros(9, 9)}, "temperature"),
    "an array for a switch": ({"ignore_eos": np.zeros((9, 9))}, "ignore_eos"),
    "stop of bytes": ({"stop": b"ab"}, "stop"),
    "a stop of ids": ({"stop": np.zeros((9, 9))}, "stop"),
}


@pytest.mark.parametrize(("given", "line"), WRONG_PARAMS.values(), ids=WRONG_PARAMS)
def test_wrong_parameters_are_one_line(given, line):
    with pytest.raises(ConfigError, match=line) as caught:
        em.SamplingParams(**given)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_parameters_and_adapters_for_each_prompt_in_any_list():
    engine = em.Engine(MODEL, num_blocks=8)
    each = [GREEDY, em.SamplingParams(temperature=0, max_tokens=1)]
    expected = written(engine.generate(IDS, each))
    for given in (tuple(each), iter(each), np.array(each, dtype=object)):
        assert written(engine.generate(IDS, given)) == expected
    for adapter in (np.array(["a", "b"]), {"a": 1}, torch.zeros(2, 2), 5):
        with pytest.raises(ConfigError) as caught:
            engine.generate(IDS, GREEDY, adapter=adapter)
        assert "\n" not in str(caught.value)
    routing = torch.zeros(2, 2, 1, 2, dtype=torch.int64)
    for wrong in (5, routing[0], routing.numpy()):
        with pytest.raises(ConfigError) as caught:
            em.token_logprobs(MODEL, IDS, routing=wrong)
        assert "\n" not in str(caught.value)
