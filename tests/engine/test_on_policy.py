"""Logprobs with gradients have the engine's bits, and the ordinary forward's gradients."""

import copy
from functools import partial
from statistics import median

import pytest
import torch
import torch.nn.functional as F
from tests.engine.test_engine import PROMPTS, ROUTERS, gpt
from tests.oracle.numerics import FLOOR_ULPS, TWO, assert_close_fp64, magnitude

from expertmesh import lora
from expertmesh.engine.engine import Engine
from expertmesh.engine.on_policy import token_logprobs
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_what_the_engine_drew_has_the_same_bits_in_training(router, dtype):
    model = gpt(dtype, moe=router, batch_invariant=True)
    engine = Engine(model, deterministic=True, token_budget=7, num_blocks=20, block_size=4)
    params = SamplingParams(temperature=1.1, seed=2, n=2, max_tokens=7, logprobs=0)
    outputs = engine.generate(PROMPTS, params)
    model.train()
    scores = token_logprobs(model, [[*o.prompt_ids, *o.token_ids] for o in outputs])
    assert all(module.training for module in model.modules())
    for output, found in zip(outputs, scores, strict=True):
        drawn = torch.tensor([one.logprob for one in output.logprobs], dtype=found.dtype)
        assert torch.equal(found[len(output.prompt_ids) - 1 :], drawn)
    sum(found.sum() for found in scores).backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


EVERYWHERE = ("attention", "shared", "experts", "head")


def with_adapters(model, *, shared=False):
    """The model with adapters on all of it that change its logits."""
    dtype = torch.promote_types(model.embedding.weight.dtype, torch.float32)
    ranks = {"rank": 5, "expert_rank": 3}
    lora.add(model, **ranks, targets=EVERYWHERE, shared=shared, dtype=dtype, seed=0)
    generator = torch.Generator().manual_seed(1)
    for one in lora.adapters(model).values():
        one.b.data.copy_(torch.randn(one.b.shape, generator=generator) * 0.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_adapters_have_the_same_bits_in_the_engine_and_in_training(shared, dtype):
    plain = gpt(dtype, moe=ROUTERS["shared"], batch_invariant=True, tie_embeddings=False)
    model = with_adapters(copy.deepcopy(plain), shared=shared)
    engine = Engine(model, deterministic=True, token_budget=7, num_blocks=20, block_size=4)
    params = SamplingParams(temperature=1.1, seed=2, n=2, max_tokens=7, logprobs=0)
    outputs = engine.generate(PROMPTS, params)
    model.train()
    ids = [[*o.prompt_ids, *o.token_ids] for o in outputs]
    scores = token_logprobs(model, ids)
    for output, found in zip(outputs, scores, strict=True):
        drawn = torch.tensor([one.logprob for one in output.logprobs], dtype=found.dtype)
        assert torch.equal(found[len(output.prompt_ids) - 1 :], drawn)
    assert not torch.equal(scores[0], token_logprobs(plain, ids)[0])
    sum(found.sum() for found in scores).backward()
    learning = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert learning == {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".adapters." in name for name in learning)


WITH_ADAPTERS = {"moe": ROUTERS["shared"], "tie_embeddings": False}


@pytest.mark.parametrize(
    ("options", "adapted"),
    [
        ({}, lambda model: model),
        (WITH_ADAPTERS, partial(with_adapters, shared=False)),
        (WITH_ADAPTERS, partial(with_adapters, shared=True)),
    ],
    ids=["plain", "adapters", "shared adapters"],
)
def test_gradients_are_those_of_the_ordinary_forward(options, adapted):
    results = []
    for invariant in (True, False):
        model = adapted(gpt(torch.float64, batch_invariant=invariant, **options))
        scores = token_logprobs(model, PROMPTS)
        sum(one.sin().sum() for one in scores).backward()
        results.append([*scores, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(results[0]) == len(results[1]) > 10
    for place, (ours, plain) in enumerate(zip(*results, strict=True)):
        assert_close_fp64(ours.detach(), plain.detach(), what=f"result {place}")


SEEDS = 7
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def with_weights(seed, dtype, **options):
    """A model with drawn weights that BF16 holds, so that they are the same in every precision."""
    model = gpt(dtype, **options)
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                drawn = 0.3 * torch.randn(parameter.shape, generator=source, dtype=torch.float64)
                parameter.copy_(drawn.bfloat16())
    return model


def gradients(model, routing):
    """Logprobs, and all gradients of a loss that is smooth in them, by name, in FP64."""
    scores = torch.cat(token_logprobs(model, PROMPTS, routing=routing)).double()
    scores.sin().sum().backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"logprobs": scores.detach(), **grads}


@pytest.mark.parametrize("dtype", PRECISIONS.values(), ids=PRECISIONS)
@pytest.mark.parametrize("router", ["softmax", "sigmoid", "shared", "residual", "pyramid"])
def test_gradients_are_as_exact_as_those_of_the_ordinary_forward(router, dtype):
    """The two-times rule on medians over several weights; experts are those of the oracle in all precisions.

    Rounding of many tokens adds up in a bias of two numbers, which has one degree of freedom: of its errors one in some
    weights is ten times the others in either arithmetic, and where its terms cancel nothing is left to divide by. So
    medians of errors are compared, relative to the parameter's gradients for all weights.
    """
    moe = ROUTERS[router]
    params = SamplingParams(max_tokens=1, return_routed_experts=True, seed=0)
    errors, sizes = {}, {}
    for seed in range(SEEDS):
        whole = with_weights(seed, torch.float64, moe=moe)
        outputs = Engine(whole).generate(PROMPTS, params)
        routing = [o.routed_experts[: len(o.prompt_ids) - 1] for o in outputs]
        oracle = gradients(whole, routing)
        ours = gradients(with_weights(seed, dtype, moe=moe, batch_invariant=True), routing)
        plain = gradients(with_weights(seed, dtype, moe=moe), routing)
        assert set(ours) == set(plain) == set(oracle) and len(ours) > 10
        for name, exact in oracle.items():
            both = [(one[name] - exact).square().mean().sqrt().item() for one in (ours, plain)]
            errors.setdefault(name, []).append(both)
            sizes.setdefault(name, []).append(magnitude(exact))
    for name, pairs in errors.items():
        mine, others = map(median, zip(*pairs, strict=True))
        size = float(torch.tensor(sizes[name]).square().mean().sqrt())
        assert mine <= TWO * others + FLOOR_ULPS * torch.finfo(dtype).eps * size, name


ALL_ROUTERS = {name: moe for name, moe in ROUTERS.items() if name != "hash"}


@pytest.mark.parametrize("router", ALL_ROUTERS.values(), ids=ALL_ROUTERS)
def test_experts_of_the_engine_are_replayed(router):
    """Weights have changed so much that routers would choose others; all layers compute what they are told, and
    learn."""
    params = SamplingParams(seed=2, n=2, max_tokens=7, return_routed_experts=True)
    outputs = Engine(gpt(moe=router)).generate(PROMPTS, params)
    ids = [[*o.prompt_ids, *o.token_ids] for o in outputs]
    routing = [o.routed_experts for o in outputs]
    model = gpt(moe=router).train()
    layers = [block.moe for block in model.layers]
    own = token_logprobs(model, ids)
    for mine, replayed in zip(own, token_logprobs(model, ids, routing=routing), strict=True):
        assert_close_fp64(replayed.detach(), mine.detach(), what="the same experts")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "router" in name:
                weight.copy_(weight.flip(0))
    seen = []
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: seen.append(out[1].topk_expert_ids_TK))
    scores = token_logprobs(model, ids, routing=routing)
    found = torch.stack([F.pad(one, (0, seen[0].shape[1] - one.shape[1])) for one in seen], 1)
    for row, chosen in zip(found.unflatten(0, (len(ids), -1)), routing, strict=True):
        assert torch.equal(row[: len(chosen)], chosen)
    others = token_logprobs(model, ids)
    assert any(not torch.equal(a, b) for a, b in zip(scores, others, strict=True))
    sum(one.sum() for one in scores).backward()
    assert all(p.grad is not None and p.grad.any() for n, p in model.named_parameters())
    assert all(layer.training and not layer._forward_pre_hooks for layer in layers)


WRONG_ROUTING = {
    "too few": ([], "0 for 1 sequences"),
    "another sequence": ([torch.zeros(3, 2, 2, dtype=torch.int64)], r"must be \(2, 2, K\)"),
    "another depth": ([torch.zeros(2, 1, 2, dtype=torch.int64)], r"must be \(2, 2, K\)"),
    "no tensor": ([[[0]]], "is list"),
    "another number of experts": ([torch.full((2, 2, 2), 5)], r"not in 0 \.\.\. 3"),
}


@pytest.mark.parametrize(("routing", "line"), WRONG_ROUTING.values(), ids=WRONG_ROUTING)
def test_routing_of_others_is_refused(routing, line):
    with pytest.raises(ConfigError, match=line):
        token_logprobs(gpt(), [[1, 2, 3]], routing=routing)


def test_wrong_sequences_are_refused():
    model = gpt()
    assert token_logprobs(model, []) == []
    for wrong, line in (([[1, 2], [3]], "two or more"), ([[1] * 65], "max_seq_len=64")):
        with pytest.raises(ConfigError, match=line):
            token_logprobs(model, wrong)


@pytest.mark.parametrize("change", ["optimizer", "data"])
def test_after_a_change_of_shared_weights_the_engine_has_their_bits(change):
    """What was kept of the old weights is gone, also where no version counts the change."""
    model = gpt(torch.bfloat16, batch_invariant=True, qk_norm=True)
    engine = Engine(model, deterministic=True)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0)
    before = engine.generate(PROMPTS, params)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter if change == "optimizer" else parameter.data).mul_(1.25)
    engine.update_weights({})
    after = engine.generate(PROMPTS, params)
    scores = token_logprobs(model, [[*o.prompt_ids, *o.token_ids] for o in after])
    for output, found in zip(after, scores, strict=True):
        drawn = torch.tensor([one.logprob for one in output.logprobs], dtype=found.dtype)
        assert torch.equal(found[len(output.prompt_ids) - 1 :], drawn)
    assert [o.logprobs for o in before] != [o.logprobs for o in after]
