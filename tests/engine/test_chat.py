"""Conversations asked in Python: prompts are the chat template's, answers those of `generate`."""

import json
import re

import pytest
from tests.engine.test_engine import gpt
from tests.support.calls import calls_of
from tests.support.hub_text import hub_folder
from transformers import AutoTokenizer

import expertmesh as em
from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.text.chat import MARKS
from expertmesh.text.tokenizer import ids_of_text, train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ m.name }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if mood %}{{ mood }}{% endif %}{% endif %}"
)
GREEDY = SamplingParams(temperature=0, max_tokens=6)
ASKED = [{"role": "user", "content": "few words"}]
TALK = [*ASKED, {"role": "assistant", "content": "some text"}, *ASKED]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("chat") / "hub", options={"chat_template": TEMPLATE})


@pytest.fixture(scope="module")
def engine(source):
    return em.Engine(source)


def test_prompts_are_those_of_transformers(source, engine):
    theirs = AutoTokenizer.from_pretrained(source)
    for messages, ours, options in (
        (ASKED, {}, {"add_generation_prompt": True}),
        (TALK, {"add_generation_prompt": False}, {}),
        (TALK[:2], {"continue_final_message": True}, {"continue_final_message": True}),
        (
            [{**ASKED[0], "name": "x"}],
            {"chat_template_kwargs": {"mood": "glad"}},
            {"add_generation_prompt": True, "mood": "glad"},
        ),
    ):
        ids = theirs.apply_chat_template(messages, return_dict=False, **options)
        assert engine.chat_ids(messages, **ours) == ids
    parts = [{"type": "text", "text": "few "}, {"type": "text", "text": "words"}]
    assert engine.chat_ids([{"role": "user", "content": parts}]) == engine.chat_ids(ASKED)
    developer, system = ([{"role": r, "content": "a"}, *ASKED] for r in ("developer", "system"))
    assert engine.chat_ids(developer) == engine.chat_ids(tuple(system))


def test_answers_are_those_of_generate(engine):
    (expected,) = engine.generate([engine.chat_ids(ASKED)], GREEDY)
    (one,) = engine.chat(ASKED, GREEDY)
    both = engine.chat([TALK, ASKED], [GREEDY, GREEDY])
    assert one.token_ids == both[1].token_ids == expected.token_ids
    assert [[*answer.prompt_ids] for answer in both] == [engine.chat_ids(m) for m in (TALK, ASKED)]
    (other,) = engine.chat(ASKED, GREEDY, chat_template_kwargs={"mood": "glad"})
    assert other.prompt_ids != one.prompt_ids
    streamed = list(engine.stream(engine.chat_ids(ASKED), GREEDY))
    assert streamed[-1].text == one.text


def test_our_own_format_where_the_tokenizer_has_the_roles():
    tokenizer = train_tokenizer(["few words " * 30], vocab_size=300, marks=MARKS)
    own = Engine(gpt(vocab_size=tokenizer.get_vocab_size()), tokenizer)
    (answer,) = own.chat(ASKED, GREEDY)
    assert [*answer.prompt_ids] == own.text.chat.prompt(ASKED)


USER = [{"role": "user"}]
REFUSED = {
    "no list": ("Hi", {}, "messages: must be a list of messages"),
    "nothing": ([], {}, "messages: must be a list of messages"),
    "an empty one": ([ASKED, []], {}, "messages: must be a list of messages"),
    "no content": (USER, {}, "messages: must be messages with a role and a text as content"),
    "one of several": ([ASKED, USER], {}, "conversation 2: messages: must be messages with a role"),
    "an image": (
        [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
        {},
        "and message 1 is not; correct it",
    ),
    "another role": ([*ASKED, {"role": "bot", "content": "a"}], {}, "message 2 has role bot"),
    "half a character": ([{"role": "user", "content": "\ud800"}], {}, "half a character"),
    "a quoted token": ([{"role": "user", "content": "<|user|>"}], {}, "quotes <|user|>"),
    "a reserved name": (ASKED, {"chat_template_kwargs": {"tools": []}}, "may not have 'tools'"),
    "no dict": (ASKED, {"chat_template_kwargs": "mood"}, "chat_template_kwargs: must be"),
    "both": (
        ASKED,
        {"add_generation_prompt": True, "continue_final_message": True},
        "continue_final_message: excludes add_generation_prompt",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_conversation_is_one_line_and_leaves_no_request(engine, name):
    messages, options, said = REFUSED[name]
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        engine.chat(messages, GREEDY, **options)
    assert "\n" not in str(caught.value) and not engine.has_work


def test_a_model_that_knows_no_conversations_says_so():
    tokenizer = train_tokenizer(["few words " * 30], vocab_size=300)
    some = train_tokenizer(["few words " * 30], vocab_size=300, marks=MARKS[:3])
    model = gpt(vocab_size=300)
    for engine, said in (
        (Engine(model), "has no tokenizer"),
        (Engine(model, tokenizer), "has no chat template, and no tokens for roles"),
        (Engine(model, some), "has no chat template, and no tokens for roles"),
    ):
        with pytest.raises(ConfigError, match=f"^messages: the model {said}; make the engine"):
            engine.chat(ASKED)


def test_messages_are_json_too_and_may_say_nothing(engine):
    assert engine.chat_ids(json.loads(json.dumps(TALK))) == engine.chat_ids(TALK)
    nothing = {"role": "assistant", "content": None}
    assert engine.chat_ids([*ASKED, nothing]) == engine.chat_ids([*ASKED, {**nothing, "content": ""}])
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for ask, what in (
        (
            lambda: engine.chat_ids([*ASKED, {**nothing, "tool_calls": [call]}]),
            "messages: have calls",
        ),
        (lambda: engine.chat(ASKED, tools=[call]), "tools: the model's chat template does not"),
        (lambda: engine.chat_ids(ASKED, tools=[1]), "tools.0.type: must be function"),
    ):
        with pytest.raises(ConfigError, match=what):
            ask()


def test_a_text_without_room_in_the_engines_window_is_not_tokenised(source):
    engine = em.Engine(source, max_len=16)
    long = "few words " * 99

    for ask, what in (
        (lambda: engine.generate([long], GREEDY), "prompt"),
        (lambda: engine.add(long, GREEDY), "prompt"),
        (lambda: next(engine.stream(long, GREEDY)), "prompt"),
        (lambda: engine.chat([{"role": "user", "content": long}], GREEDY), "messages"),
        (lambda: engine.chat_ids([{"role": "user", "content": long}]), "messages"),
    ):
        refused = pytest.raises(ConfigError, match=rf"^{what}: .*the model has( no)? room")
        with calls_of(ids_of_text) as calls, refused:
            ask()
        assert not calls
    assert not engine.has_work
