"""Philox against the published test vectors, its uses, and keys."""

import math
from unittest.mock import Mock, patch

import pytest
import torch

from expertmesh import MoELayer
from expertmesh.moe.init import reset_custom_modules
from expertmesh.moe.routing_noise import (
    STREAM_RANDOM_DROP,
    STREAM_ROUTER_NOISE,
    gaussian,
    gumbel,
    key_noise,
    philox4x32,
    random_bits,
    uniform,
)

# kat_vectors of the Random123 library, philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def draw(counter, key):
    return philox4x32(*(torch.tensor(word, dtype=torch.int64) for word in (*counter, *key)))


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_gives_the_published_vectors(counter, key, expected):
    assert draw(counter, key).tolist() == list(expected)


def test_compiled_philox_gives_the_same_bits():
    torch._dynamo.reset()
    key = torch.tensor([2**62 + 12345, 2**31 + 7])
    index = torch.arange(1000) * 2**37 // 3
    compiled = torch.compile(random_bits, fullgraph=True, backend="aot_eager")
    for layer_index in (0, 2**24 - 1):
        kwargs = {"layer_index": layer_index, "stream": STREAM_RANDOM_DROP}
        assert torch.equal(compiled(key, index, 7, **kwargs), random_bits(key, index, 7, **kwargs))


def bits(seed=0, step=0, tokens=64, columns=6, layer_index=0, stream=STREAM_ROUTER_NOISE, index=None):
    index = torch.arange(tokens) if index is None else index
    return random_bits(torch.tensor([seed, step]), index, columns, layer_index=layer_index, stream=stream)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"seed": 2**40},
        {"seed": -1},
        {"step": 1},
        {"layer_index": 1},
        {"stream": STREAM_RANDOM_DROP},
        {"index": torch.arange(64) + 2**33},
    ],
)
def test_every_part_of_the_key_matters(change):
    assert (bits() == bits(**change)).sum() == 0


def test_a_token_draws_the_same_wherever_it_stands():
    index = torch.tensor([5, 63, 2, 2])
    assert torch.equal(bits(index=index), bits()[index])
    assert torch.equal(bits(columns=3), bits(columns=6)[:, :3])


def test_columns_and_tokens_do_not_repeat():
    assert bits(tokens=512, columns=9).unique().numel() == 512 * 9


def moments_fit(sample, mean, variance, fourth):
    """Mean and variance within five standard errors."""
    n = sample.numel()
    assert abs(sample.mean().item() - mean) < 5 * math.sqrt(variance / n)
    assert abs(sample.var().item() - variance) < 5 * math.sqrt((fourth - variance**2) / n)


def test_uniform_gumbel_and_gaussian_have_their_moments():
    raw = bits(tokens=20000, columns=8)
    u = uniform(raw, torch.float64)
    assert u.min() > 0 and u.max() < 1
    moments_fit(u, 1 / 2, 1 / 12, 1 / 80)
    variance = math.pi**2 / 6
    moments_fit(gumbel(raw, torch.float64), 0.5772156649015329, variance, 5.4 * variance**2)
    moments_fit(gaussian(raw[:, :4], raw[:, 4:], torch.float64), 0.0, 1.0, 3.0)


def test_extreme_bits_give_finite_numbers_in_fp32():
    raw = torch.tensor([0, 2**32 - 1, 2**31])
    u = uniform(raw, torch.float32)
    assert u.min() > 0 and u.max() < 1
    assert gumbel(raw, torch.float32).isfinite().all()
    assert gaussian(raw, raw, torch.float32).isfinite().all()


def noisy_layer(**kwargs):
    options = {"dim": 8, "hidden_dim": 8, "num_experts": 8, "top_k": 2, "seed": 0} | kwargs
    return MoELayer(router_noise="gumbel", **options)


def choices(layer, x, **kwargs):
    return layer(x, **kwargs)[1].topk_expert_ids_TK


def test_keyed_noise_depends_on_seed_step_layer_and_token_only():
    layer, x = noisy_layer(), torch.randn(32, 8)
    key_noise(layer, seed=3, step=5)
    first = choices(layer, x)
    torch.manual_seed(99)
    assert torch.equal(choices(layer, x), first)
    for seed, step in ((3, 6), (4, 5)):
        key_noise(layer, seed=seed, step=step)
        assert not torch.equal(choices(layer, x), first)
    other = noisy_layer(layer_index=1)
    other.load_state_dict(layer.state_dict())
    key_noise(torch.nn.ModuleList([layer, other]), seed=3, step=5)
    assert torch.equal(choices(layer, x), first)
    assert not torch.equal(choices(other, x), first)


def test_half_a_batch_draws_its_own_half_of_the_noise():
    layer, x = noisy_layer(), torch.randn(32, 8)
    key_noise(layer, seed=3, step=5)
    whole = choices(layer, x)
    assert torch.equal(choices(layer, x[16:], token_index=torch.arange(16, 32)), whole[16:])
    assert not torch.equal(choices(layer, x[16:]), whole[16:])


def test_an_unkeyed_layer_follows_torch_manual_seed():
    layer, x = noisy_layer(), torch.randn(32, 8)
    torch.manual_seed(7)
    first, second = choices(layer, x), choices(layer, x)
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(choices(layer, x), first)


def test_evaluation_draws_nothing():
    layer = noisy_layer(input_jitter=0.5, input_dropout=0.5).eval()
    x = torch.randn(32, 8)
    state = torch.random.get_rng_state()
    first = choices(layer, x)
    key_noise(layer, seed=1, step=1)
    assert torch.equal(choices(layer, x), first)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_operator_passes_opcheck():
    words = [torch.randint(0, 2**32, shape) for shape in ((5, 1), (1, 3), (), (5, 3))]
    keys = [torch.tensor(7), torch.tensor(2**32 - 1)]
    torch.library.opcheck(torch.ops.expertmesh.philox4x32, (*words, *keys))


def test_nothing_is_said_where_there_are_several_gpus():
    """Torch warns of a fork of all of them that does not name them."""
    state = torch.zeros(16, dtype=torch.uint8)
    gpus = {"device_count": lambda: 2, "get_rng_state": lambda _: state, "set_rng_state": Mock()}
    with (
        patch.multiple(torch.cuda, **gpus),
        patch.multiple(torch.random, _fork_rng_warned_already=False),
    ):
        reset_custom_modules(torch.nn.Linear(2, 2), seed=1, name="x")
    assert gpus["set_rng_state"].call_count == 2
