"""The `openai` client, as it comes, against a server process."""

import asyncio

import httpx2
import openai
import pytest
from tests.support.serving import events

import expertmesh as em

PROMPT = "def main("
CHAT = [{"role": "user", "content": "import os"}]


@pytest.fixture(scope="module")
def engine(folder):
    return em.Engine(folder)


def test_the_model_is_listed(client):
    (card,) = client.models.list().data
    assert (card.id, card.object, card.max_model_len) == ("tiny", "model", 512)
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize(
    "prompt",
    [PROMPT, [PROMPT, "é"], [5, 6, 7], [[5, 6, 7], [8]]],
    ids=["text", "texts", "ids", "lists"],
)
def test_a_completion_is_what_the_engine_answers(client, engine, prompt):
    found = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=8, seed=3, n=2, temperature=0.9, logprobs=2
    )
    params = em.SamplingParams(temperature=0.9, seed=3, max_tokens=8, n=2, logprobs=2)
    outputs = engine.generate(prompt, params)
    assert [choice.index for choice in found.choices] == list(range(len(outputs)))
    assert [choice.text for choice in found.choices] == [one.text for one in outputs]
    assert [choice.finish_reason for choice in found.choices] == [one.finish_reason for one in outputs]
    for choice, one in zip(found.choices, outputs, strict=True):
        assert choice.logprobs.token_logprobs == [entry.logprob for entry in one.logprobs]
    assert found.usage.completion_tokens == sum(len(one.token_ids) for one in outputs)


def test_a_stream_joined_is_the_whole(client):
    asked = {
        "model": "tiny",
        "prompt": [PROMPT, "é"],
        "max_tokens": 12,
        "seed": 1,
        "n": 2,
        "logprobs": 1,
    }
    whole = client.completions.create(**asked)
    texts, tokens, ends, usage = {}, {}, {}, None
    for event in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}
    ):
        so_far = usage.completion_tokens if usage is not None else 0
        assert event.usage.completion_tokens >= so_far
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            ends[choice.index] = choice.finish_reason
        usage = event.usage or usage
    assert [texts[i] for i in range(4)] == [choice.text for choice in whole.choices]
    assert [tokens[i] for i in range(4)] == [choice.logprobs.token_logprobs for choice in whole.choices]
    assert [ends[i] for i in range(4)] == [choice.finish_reason for choice in whole.choices]
    counted = (usage.prompt_tokens, usage.completion_tokens)
    assert counted == (whole.usage.prompt_tokens, whole.usage.completion_tokens)


def test_echo_has_the_prompt_and_its_logprobs(client, engine):
    found = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, temperature=0, echo=True, logprobs=2
    ).choices[0]
    (one,) = engine.generate(PROMPT, em.SamplingParams(temperature=0, max_tokens=3, logprobs=2, prompt_logprobs=2))
    assert found.text == PROMPT + one.text
    scores = [None, *(entry.logprob for entry in one.prompt_logprobs[1:] + one.logprobs)]
    assert found.logprobs.token_logprobs == scores
    for score, top in zip(scores[1:], found.logprobs.top_logprobs[1:], strict=True):
        assert score in top.values()  # greedy is told from these by equality
    assert found.logprobs.text_offset[0] == 0 and len(found.logprobs.text_offset) == len(scores)
    only = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, temperature=0, echo=True, logprobs=2)
    assert only.choices[0].text == PROMPT and only.usage.completion_tokens == 0
    assert only.choices[0].logprobs.token_logprobs == scores[: len(one.prompt_ids)]


def test_a_conversation_whole_and_as_a_stream(client, engine):
    asked = {
        "model": "tiny", "messages": CHAT, "seed": 5, "max_completion_tokens": 10, "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    ids = engine.text.chat.prompt(CHAT)
    (one,) = engine.generate([ids], em.SamplingParams(seed=5, max_tokens=10))
    assert whole.message.content == one.text and whole.message.role == "assistant"
    assert len(whole.logprobs.content) == len(one.token_ids)
    assert all(len(entry.top_logprobs) == 2 for entry in whole.logprobs.content)
    pieces = list(client.chat.completions.create(**asked, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == one.text
    assert pieces[-1].choices[0].finish_reason == one.finish_reason


def test_async_streams_side_by_side_are_those_alone(server, client):
    async def one(asynchronous, seed):
        stream = await asynchronous.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=20, seed=seed, stream=True
        )
        return "".join([event.choices[0].text async for event in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as asynchronous:
            return await asyncio.gather(*(one(asynchronous, seed) for seed in range(8)))

    texts = asyncio.run(all_of_them())
    for seed in (0, 7):
        alone = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, seed=seed)
        assert texts[seed] == alone.choices[0].text


def test_a_stop_split_over_tokens_and_bytes_ends_a_stream_before_it(client):
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "seed": 2, "temperature": 1.0}
    whole = client.completions.create(**asked).choices[0].text
    for begin in (3, 10, 15):
        for size in (1, 3, 6):
            stop = whole[begin : begin + size]
            if "\ufffd" in stop or not stop:
                continue
            expected = whole[: whole.index(stop)]
            stream = list(client.completions.create(**asked, stop=[stop], stream=True))
            assert "".join(event.choices[0].text for event in stream) == expected
            assert stream[-1].choices[0].finish_reason == "stop"


def test_characters_of_several_tokens_arrive_whole(client, engine):
    ids = engine.tokenizer.encode("🎉é").ids
    for end in (
        b"\xf0",
        b"\x9f",
    ):  # forced, token by token, by biases that no other token overcomes
        assert end in [bytes([one]) for one in "🎉".encode()]
    table = {i: engine.tokenizer.id_to_token(i) for i in ids}
    assert len(table) >= 1
    text = ""
    for event in client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=4,
        stream=True,
        logit_bias={str(ids[0]): 100},
        temperature=0,
    ):
        text += event.choices[0].text
    whole = client.completions.create(
        model="tiny", prompt="x", max_tokens=4, logit_bias={str(ids[0]): 100}, temperature=0
    )
    assert text == whole.choices[0].text


def test_the_lines_of_a_stream_are_server_sent_events(server):
    body = {"prompt": PROMPT, "max_tokens": 3, "stream": True}
    with httpx2.stream("POST", f"{server.address}/v1/completions", json=body, timeout=60) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found, is_done = events(answer.iter_lines())
    assert is_done and found[-1]["choices"][0]["finish_reason"] == "length"
