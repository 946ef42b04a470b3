"""The engine decodes an encoder-decoder: a toy one, defined here, that shares nothing with GPT but the layers."""

import pytest
import torch
import torch.nn.functional as F
from tests.oracle.numerics import assert_close_fp64
from tests.support.generation import written_ids
from torch import nn

from expertmesh.engine.lockstep import Lockstep
from expertmesh.engine.request import SamplingParams, for_prompts
from expertmesh.errors import ConfigError
from expertmesh.models.attention import Attention, rope_tables
from expertmesh.models.cache import KVCache
from expertmesh.models.decoder import CausalLM, EncoderDecoder
from expertmesh.models.gpt.config import ModelConfig
from expertmesh.models.gpt.model import GPT

CONFIG = ModelConfig(vocab_size=50, max_seq_len=24, dim=16, num_layers=1, num_heads=2, num_kv_heads=1)
SOURCES = [[3, 1, 4, 1, 5, 9], [2], [6, 5, 3, 5]]
PROMPTS = [[7], [8, 9, 10], [7, 11]]


class Cache(KVCache):
    """Keys and values of the decoder's tokens, and what the encoder made of the sources."""

    memory_BSD: torch.Tensor
    memory_mask_BS: torch.Tensor


class Toy(nn.Module):
    """One layer each: a source is embedded and mixed; the decoder attends to its own tokens, then to the source."""

    def __init__(self):
        super().__init__()
        self.vocab_size, self.max_seq_len, self.max_source_len = 50, 24, 8
        self.embedding = nn.Embedding(50, 16)
        self.mix = nn.Linear(16, 16)
        self.query = nn.Linear(16, 16)
        self.output = nn.Linear(16, 50)
        self.attention = Attention(
            dim=16,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            qk_norm=False,
            norm_eps=1e-5,
            layer_index=0,
        )
        self.dropout = nn.Dropout(0.5)
        self.calls = []

    @property
    def device(self):
        return self.embedding.weight.device

    def new_cache(self, *, batch_size, max_len):
        return Cache(CONFIG, batch_size=batch_size, max_len=max_len, dtype=self.mix.weight.dtype)

    def encode(self, ids_BS, *, token_mask_BS, cache):
        self.calls.append(tuple(ids_BS.shape))
        position = torch.arange(ids_BS.shape[1])[:, None] / 10
        cache.memory_BSD = self.dropout(self.mix(self.embedding(ids_BS) + position)).sin()
        mask = torch.ones_like(ids_BS, dtype=torch.bool) if token_mask_BS is None else token_mask_BS
        cache.memory_mask_BS = mask

    def next_logits(self, ids_BS, *, token_mask_BS, cache):
        context = cache.begin(ids_BS, token_mask_BS=token_mask_BS)
        cos, sin = rope_tables(context.positions, head_dim=8, base=100.0, dtype=torch.float64)
        x = self.embedding(ids_BS)
        x = x + self.attention(x, cos=cos, sin=sin, context=context)
        seen = cache.memory_mask_BS[:, None]
        x = x + F.scaled_dot_product_attention(self.query(x), cache.memory_BSD, cache.memory_BSD, attn_mask=seen)
        return self.output(self.dropout(x[:, -1]))


@pytest.fixture
def toy():
    torch.manual_seed(0)
    model = Toy().double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.8)
    return model


def uncached_logits(toy, source, ids):
    """All anew, of one sequence without padding."""
    cache = toy.new_cache(batch_size=1, max_len=24)
    toy.encode(torch.tensor([source]), token_mask_BS=None, cache=cache)
    return toy.next_logits(torch.tensor([ids]), token_mask_BS=None, cache=cache)[0]


def test_what_the_engine_needs_is_what_the_protocols_say(toy):
    assert isinstance(toy, EncoderDecoder)
    gpt = GPT(CONFIG, device="meta")
    assert isinstance(gpt, CausalLM) and not isinstance(gpt, EncoderDecoder)


@torch.no_grad()
def test_greedy_decoding_of_uneven_prompts_and_sources_equals_the_uncached_one(toy):
    written = written_ids(toy, PROMPTS, sources=SOURCES, max_tokens=12)
    assert toy.calls == [(3, 6)], "sources are read once"
    assert toy.training, "the mode is put back"
    toy.eval()
    for row, (source, prompt) in enumerate(zip(SOURCES, PROMPTS, strict=True)):
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(uncached_logits(toy, source, ids).argmax()))
        assert written[row] == ids[len(prompt) :]
        assert len(set(ids)) > 3, "the toy repeats itself too much to show anything"
    others = written_ids(toy, PROMPTS, sources=SOURCES[::-1], max_tokens=12)
    assert others != written, "the sources must matter"


@torch.no_grad()
def test_cached_logits_equal_uncached_ones_to_rounding(toy):
    toy.eval()
    ids = [7, 8, 9, 10, 11]
    cache = toy.new_cache(batch_size=1, max_len=24)
    toy.encode(torch.tensor(SOURCES[:1]), token_mask_BS=None, cache=cache)
    for end in range(1, len(ids) + 1):
        new = torch.tensor([ids[end - 1 : end]])
        found = toy.next_logits(new, token_mask_BS=None, cache=cache)[0]
        expected = uncached_logits(toy, SOURCES[0], ids[:end])
        assert_close_fp64(found, expected, what=f"logits after {end} tokens")


def test_sampled_sequences_depend_on_their_own_source_and_prompt_alone(toy):
    options = {"max_tokens": 10, "temperature": 0.8}
    written = written_ids(toy, PROMPTS, sources=SOURCES, seed=5, **options)
    for row, params in enumerate(for_prompts([SamplingParams(seed=5)] * 3)):
        own = {"sources": [SOURCES[row]], "seed": params.seed}
        assert written_ids(toy, [PROMPTS[row]], **own, **options) == [written[row]]


def test_wrong_sources_are_refused_at_once(toy):
    for sources, words in (
        (None, "sources: 0 for 3 prompts"),
        (SOURCES[:2], "sources: 2 for 3 prompts"),
        ([[], [1], [2]], "source='': is empty"),
        ([[50], [1], [2]], "token id 50: must be a whole number from 0 to 49"),
        ([[1] * 9, [1], [2]], "source of 9 tokens: the model reads at most 8"),
    ):
        with pytest.raises(ConfigError, match=words):
            Lockstep(toy).generate(PROMPTS, SamplingParams(), sources=sources)
    with pytest.raises(ConfigError, match="sources: a GPT reads none"):
        Lockstep(GPT(CONFIG)).generate(PROMPTS, SamplingParams(), sources=SOURCES)
