"""Multi-head latent attention: both ways to it are one function, caches hold what the paper says, and bits follow no
neighbour."""

import pytest
import torch
from tests.engine.test_engine import GREEDY, PROMPTS, alone, gpt
from tests.oracle.numerics import assert_close_fp64, assert_two_times
from tests.support.bits import assert_bits_follow_no_neighbour_and_training_has_them
from tests.support.memory import peak_bytes

from expertmesh.config.latent import LatentAttentionConfig, RopeScalingConfig
from expertmesh.engine.engine import Engine
from expertmesh.engine.kv_cache import PagedCache
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.config import ModelConfig

SIZES = {
    "kv_lora_rank": 9,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}
YARN = {
    "factor": 4.0,
    "original_max_seq_len": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
KINDS = {
    "q_lora": {},
    "no q_lora": {"q_lora_rank": None},
    "halves": {"interleaved": False},
    "wide values": {"v_head_dim": 13},
}


def latent(dtype=torch.float64, *, sizes=None, **options):
    given = {"latent": SIZES | (sizes or {}), "rope_scaling": YARN}
    plain = {"qk_norm": False, "num_kv_heads": None, "head_dim": None}
    return gpt(dtype, **plain | given | options)


@pytest.mark.parametrize("sizes", KINDS.values(), ids=KINDS)
def test_decoding_with_absorbed_weights_is_the_plain_form(sizes):
    """The dense forward makes keys and values of all heads, the engine and the cache absorb the matrices that make
    them."""
    model = latent(sizes=sizes)
    ids = torch.randint(64, (2, 20))
    with torch.no_grad():
        whole = model(ids).logits_BSV
        cache = model.new_cache(batch_size=2, max_len=20)
        steps = [ids[:, :7], *ids[:, 7:].split(1, 1)]
        found = [model.next_logits(step, token_mask_BS=None, cache=cache) for step in steps]
    assert_close_fp64(torch.stack(found, 1), whole[:, 6:], what="logits")


def test_the_dense_cache_keeps_its_vectors_once():
    """Rows go on as copies of others, as beams do, and the bytes are those of the formula."""
    model = latent()
    numbers = model.config.cache_numbers * model.config.num_layers
    made = []
    size = peak_bytes(lambda: made.append(model.new_cache(batch_size=2, max_len=20)))
    assert size == numbers * 2 * 20 * 8
    cache, ids = made[0], torch.randint(64, (2, 12))
    rows = torch.tensor([1, 0, 1])
    with torch.no_grad():
        model.next_logits(ids[:, :7], token_mask_BS=None, cache=cache)
        for chosen in (rows, torch.tensor([2, 1, 0])):  # of another number, and of the same
            cache.select(chosen)
        found = model.next_logits(ids[rows.flip(0), 7:], token_mask_BS=None, cache=cache)
        whole = model(ids).logits_BSV[rows.flip(0), -1]
    assert_close_fp64(found, whole, what="logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounding_of_the_absorbed_form(dtype):
    """Against FP64, at most twice as far as the plain form, forward and backward."""
    results = {}
    for name, this, invariant in (
        ("absorbed", dtype, True),
        ("plain", dtype, False),
        ("oracle", torch.float64, False),
    ):
        model = latent(torch.float64, batch_invariant=invariant, init_std=0.1).to(this)
        ids = torch.arange(64).view(4, 16) * 7 % 64
        logits = model(ids).logits_BSV
        (logits.double() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        grads = {n: p.grad for n, p in model.named_parameters() if ".attention." in n}
        results[name] = {"logits": logits.detach()} | grads
    for what, exact in results["oracle"].items():
        assert_two_times(results["absorbed"][what], results["plain"][what], exact, what=what)


@pytest.mark.parametrize("cache", [{}, {"token_budget": 5, "block_size": 4}, {"num_blocks": 16, "block_size": 4}])
def test_the_engine_gives_the_tokens_of_full_passes(cache):
    model = latent()
    engine = Engine(model, **cache)
    for _ in range(2):  # cold, and with the prefixes kept
        for prompt, output in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert list(output.token_ids) == alone(model, prompt, 9)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_follow_no_neighbour_and_training_has_them(dtype):
    model = latent(dtype, batch_invariant=True)
    params = SamplingParams(temperature=1.1, seed=2, n=2, max_tokens=7, logprobs=0)
    caches = {"token_budget": 3, "block_size": 4}, {"num_blocks": 20, "block_size": 4}
    assert_bits_follow_no_neighbour_and_training_has_them(model, PROMPTS, params, *caches)


def test_the_cache_of_the_published_model_holds_576_numbers_a_layer():
    v3 = ModelConfig(
        dim=7168,
        num_layers=61,
        num_heads=128,
        latent=LatentAttentionConfig(kv_lora_rank=512, q_lora_rank=1536),
    )
    assert v3.cache_numbers == 576
    cache = PagedCache(v3, num_blocks=2, block_size=4, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert cache.k is cache.v and cache.k.numel() == 61 * 8 * 576


def test_yarn_turns_as_its_equations_say():
    """Of Peng et al. 2023: fast pairs keep their frequency, slow ones have a factor-th, cosines grow by 0.1 ln(s) +
    1."""
    scaling = RopeScalingConfig(factor=8.0, original_max_seq_len=64)
    first, last = scaling.mixed_pairs(dim=32, base=10000.0)
    assert (first, last) == (
        0,
        5,
    )  # 32 ln(64 / 2 pi n) / (2 ln 1e4) is below 0 at n = 32, and 4.03 at n = 1
    assert scaling.cos_factor == pytest.approx(1.2079, abs=1e-4)
    assert scaling.score_factor == 1.0
    assert RopeScalingConfig(factor=40.0, mscale=1.0, mscale_all_dim=1.0).cos_factor == 1.0
    assert RopeScalingConfig(factor=40.0, mscale=1.0, mscale_all_dim=1.0).score_factor == pytest.approx(
        1.8738, abs=1e-3
    )


BAD = {
    "no rank": ({"latent": {"q_lora_rank": 4}}, "kv_lora_rank"),
    "odd": ({"latent": SIZES | {"qk_rope_head_dim": 3}}, "qk_rope_head_dim=3"),
    "grouped": ({"latent": SIZES, "num_kv_heads": 2}, "num_kv_heads=2"),
    "norm": ({"latent": SIZES, "qk_norm": True}, "qk_norm"),
    "slow": ({"rope_scaling": {"factor": 2.0, "beta_slow": 40.0}}, "beta_slow=40"),
    "idle": ({"rope_scaling": {"mscale": 1.0}}, "factor=1"),
    "shrunk": ({"rope_scaling": {"factor": 0.5}}, "factor=0.5"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ModelConfig.model_validate(options)
    assert "\n" not in str(caught.value)
