"""How long a sequence may be: what the model, max_len and the cache have room for, said the same everywhere."""

import pytest
import torch

import expertmesh as em
from expertmesh.config.server import ServerConfig
from expertmesh.engine.checks import params_of
from expertmesh.errors import ConfigError
from expertmesh.text.tokenizer import train_tokenizer

CONFIG = em.recipe("gpt-moe-test").model
TEXTS = ["def main():\n    return 'é'\n", "import os\n"] * 20

ROOMS = {
    "the model's": ({}, 64, "the model's max_seq_len=64"),
    "given": ({"max_len": 20}, 20, "max_len=20"),
    "one block": ({"num_blocks": 1}, 33, "the cache holds 32 tokens"),
    "one small block": ({"num_blocks": 1, "block_size": 1}, 2, "the cache holds 1 token"),
    "few blocks": ({"num_blocks": 3, "block_size": 8}, 25, "the cache holds 24 tokens"),
    "fewer blocks than given": ({"num_blocks": 1, "max_len": 50}, 33, "the cache holds 32 tokens"),
    "more blocks than given": ({"num_blocks": 3, "max_len": 50}, 50, "max_len=50"),
    "just enough": ({"num_blocks": 2}, 64, "the model's max_seq_len=64"),
    "few bytes": ({"cache_bytes": 40_000}, 33, "the cache holds 32 tokens"),
    "guesses": ({"num_blocks": 1, "num_draft_tokens": 3}, 33, "the cache holds 32 tokens"),
}


def engine_of(**options):
    torch.manual_seed(0)
    tokenizer = train_tokenizer(TEXTS, vocab_size=CONFIG.vocab_size)
    return em.Engine(em.GPT(CONFIG, dtype=torch.float32, seed=0).eval(), tokenizer, **options)


@pytest.mark.parametrize(("options", "room", "line"), ROOMS.values(), ids=ROOMS)
def test_the_room_that_is_said_is_there(options, room, line):
    engine = engine_of(**options)
    assert engine.max_len == room
    params = em.SamplingParams(temperature=0, ignore_eos=True)
    for size in {1, room // 2, room - 1}:
        (answer,) = engine.generate([[5] * size], params)
        assert len(answer.token_ids) == room - size
    whole = em.SamplingParams(temperature=0, ignore_eos=True, max_tokens=room - 1)
    assert len(engine.generate([[5]], whole)[0].token_ids) == room - 1
    for prompt, most in (([5] * room, None), ([5] * room, 1), ([5], room), ([5] * 200, None)):
        with pytest.raises(ConfigError, match=line) as caught:
            engine.add(prompt, em.SamplingParams(max_tokens=most))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("options", "room"), [row[:2] for row in ROOMS.values()], ids=ROOMS)
def test_the_server_says_the_same(options, room):
    pytest.importorskip("fastapi")
    from expertmesh.serve.app import ServerApp
    from expertmesh.serve.schema import CompletionRequest

    app = ServerApp(engine_of(**options), ServerConfig(), model_name="tiny", version="0")
    assert app._card("tiny")["max_model_len"] == room
    job = app.reader.completion(CompletionRequest(prompt=[5], max_tokens=500))
    assert params_of(job.params[0]).max_tokens == room - 1


def test_a_cache_without_room_for_a_block_is_refused():
    block = 32 * CONFIG.num_layers * CONFIG.cache_numbers * 4
    assert engine_of(cache_bytes=block).max_len == 33
    for wrong in (10, block - 1):
        with pytest.raises(ConfigError, match=f"cache_bytes={wrong}: a block of 32 tokens takes"):
            engine_of(cache_bytes=wrong)
