"""The ordinary mode computes the bits of the deterministic one where the kernels in C are the only way: BF16 by the
processor's own instructions."""

from importlib.util import find_spec

import pytest
import torch
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.models.test_latent_attention import latent
from tests.support.adapters import EXPERTS, make_adapter

from expertmesh.engine.captured import OPTIONAL
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.moe.layer import grouped_layers
from expertmesh.ops import native_linear

PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=0, ignore_eos=True)
LONG = [5, 9, 7, 1, 3] * 10
ASKED = [*PROMPTS, LONG]
WHO = ["a", None, "b", "a", "a", None, "b"]
MODELS = {
    "dense layer, biases": {"first_dense_layers": 1, "qkv_bias": True, "moe": {"bias": True}},
    "sigmoid, shared": {"moe": {**ROUTERS["sigmoid"], **ROUTERS["shared"]}},
    "cosine": {"moe": ROUTERS["cosine"]},
    "residual": {"moe": ROUTERS["residual"]},
    "sinks, window": {"sinks": True, "sliding_window": 4},
    "norms of projections": {"qk_norm_scope": "projection"},
}
ARRANGEMENTS = {
    "together": {},
    "chunks": {"token_budget": 3, "block_size": 4},
    "preempted": {"num_blocks": 18, "block_size": 4, "max_sequences": 6},
    "drafts": {"num_draft_tokens": 3},
    "cold": {"prefix_caching": False},
    **({"compiled": {"compile": True}} if find_spec(OPTIONAL) else {}),
}
FEW = {name: how for name, how in ARRANGEMENTS.items() if name in ("chunks", "compiled")}


def answers(engine, prompts=ASKED, **how):
    found = engine.generate(prompts, PARAMS, **how)
    return [(o.prompt_ids, o.token_ids, o.logprobs, o.prompt_logprobs) for o in found]


def engine_of(make, form=None, **options):
    """An engine of a model without the option `batch_invariant`, or with it."""
    is_deterministic = options.get("deterministic", False)
    model = make(torch.bfloat16, batch_invariant=is_deterministic)
    for _, _, experts in grouped_layers(model) if form else ():
        experts.convert(form, group_size=20)
    return Engine(model, **options)


def assert_one_way(found, expected):
    if native_linear.is_only_way(torch.empty(0, dtype=torch.bfloat16)):
        assert found == expected
    else:
        assert [len(ids) for _, ids, *_ in found] == [len(ids) for _, ids, *_ in expected]


def assert_bits_are_the_deterministic_ones(make, *, form=None, arrangements=ARRANGEMENTS, **how):
    expected = answers(engine_of(make, form, deterministic=True, **how))
    for options in arrangements.values():
        engine = engine_of(make, form, **options, **how)
        for _ in range(2):  # cold, and with the prefixes kept
            assert_one_way(answers(engine), expected)
    assert_one_way([answers(engine, [prompt])[0] for prompt in ASKED], expected)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_models(options):
    def make(dtype, **more):
        return gpt(dtype, **options, **more)

    assert_bits_are_the_deterministic_ones(make, arrangements={"chunks": ARRANGEMENTS["chunks"]})


def test_every_arrangement():
    assert_bits_are_the_deterministic_ones(lambda dtype, **more: gpt(dtype, **more))


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_quantised_experts(form):
    def make(dtype, **more):
        return gpt(dtype, dim=40, **more)

    assert_bits_are_the_deterministic_ones(make, form=form, arrangements=FEW)


def test_latent_attention():
    assert_bits_are_the_deterministic_ones(latent, arrangements=FEW)


def test_sixty_four_together_and_every_number_of_threads():
    prompts = [[1 + i % 50, 2 + i % 7, 3] for i in range(64)]
    expected = answers(engine_of(gpt, deterministic=True), prompts)
    assert_one_way(answers(engine_of(gpt), prompts), expected)
    before = torch.get_num_threads()
    torch.set_num_threads(3 - min(before, 2))
    try:
        assert_one_way(answers(engine_of(gpt), prompts), expected)
        assert answers(engine_of(gpt, deterministic=True), prompts) == expected
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("form", [None, "int8"])
def test_adapters(tmp_path, form):
    config = gpt().config
    a = make_adapter(tmp_path / "a", config, seed=1)
    only = {"modules": ("v_proj", "q_proj"), "parameters": EXPERTS[1:]}
    b = make_adapter(tmp_path / "b", config, seed=2, rank=3, alpha=2, **only)
    found = {}
    for mode, options in (("deterministic", {"deterministic": True}), ("ordinary", {})):
        engine = engine_of(gpt, form, adapters={"a": a, "b": b}, **options)
        found[mode] = answers(engine, adapter=WHO)
        assert len({ids for _, ids, *_ in found[mode]}) > 3  # the adapters say something
        alone = [answers(engine, [p], adapter=[who])[0] for p, who in zip(ASKED, WHO, strict=True)]
        if mode == "deterministic":
            assert alone == found[mode]
        else:
            assert_one_way(alone, found["deterministic"])
    assert_one_way(found["ordinary"], found["deterministic"])
