"""Fields that decide how a conversation becomes a prompt, and the fields that are refused since they would change an
answer."""

from dataclasses import replace

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.calls import calls_of

import expertmesh as em
from expertmesh.config.server import ServerConfig
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import RequestReader
from expertmesh.serve.schema import (
    ANY,
    HARMLESS,
    INSTEAD,
    RENAMED,
    ChatRequest,
    CompletionRequest,
    Sampling,
    TokenizeChat,
    TokenizeText,
)
from expertmesh.text.chat import MARKS, OwnFormat, TemplateFormat
from expertmesh.text.format import text_format
from expertmesh.text.tokenizer import ids_of_text, load_tokenizer, train_tokenizer

TEMPLATE = (
    "{{ reasoning_effort }}{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name is defined %} {{ m.name }}{% "
    "endif %}{{ '\n' }}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% "
    "endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is false %}<think></think>{% endif "
    "%}{% endif %}"
)
USER = {"role": "user", "content": "Hi"}
ASKED = "<|im_start|>user\nHi<|im_end|>\n"
ANSWER = "<|im_start|>assistant\n"
HALF = [USER, {"role": "assistant", "content": "It is "}]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))


def reader_of(tokenizer, folder, template):
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    config = em.recipe("gpt-moe-test", {"model.max_seq_len": 256}).model
    engine = em.Engine(em.GPT(config, seed=0).eval(), load_tokenizer(path), num_blocks=64)
    engine.text = text_format(engine.text.tokenizer, path, model=engine.model)
    return RequestReader(engine, ServerConfig(), "m")


@pytest.fixture(scope="module")
def reader(tokenizer, tmp_path_factory):
    return reader_of(tokenizer, tmp_path_factory.mktemp("chatml"), TEMPLATE)


def prompt_of(reader, fields):
    """The prompt as text, the same for an answer and for /tokenize."""
    body = {"messages": [USER], **fields}
    (ids,) = reader.chat(ChatRequest.model_validate(body)).prompts
    assert reader.tokenize(TokenizeChat.model_validate(body)) == ids
    return reader.text.tokenizer.decode(ids, skip_special_tokens=False)


ASSISTANT = {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
PROMPTS = [
    ({}, ASKED + ANSWER),
    ({"chat_template_kwargs": {"enable_thinking": False}}, f"{ASKED}{ANSWER}<think></think>"),
    ({"chat_template_kwargs": {"enable_thinking": True, "other": [1]}}, ASKED + ANSWER),
    ({"chat_template_kwargs": None, "add_generation_prompt": None, "continue_final_message": None}, ASKED + ANSWER),
    ({"add_generation_prompt": False}, ASKED),
    ({"messages": HALF, "continue_final_message": True}, f"{ASKED}{ANSWER}It is "),
    ({"messages": HALF, "continue_final_message": True, "add_generation_prompt": False}, f"{ASKED}{ANSWER}It is "),
    ({"messages": [{"role": "user", "content": ""}], "continue_final_message": True}, "<|im_start|>user\n"),
    ({"reasoning_effort": "high"}, f"high{ASKED}{ANSWER}"),
    ({"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}, f"low{ASKED}{ANSWER}"),
    ({"messages": [{**USER, "name": "Bob"}]}, "<|im_start|>user Bob\nHi<|im_end|>\n" + ANSWER),
    ({"messages": [{**USER, "name": None, "tool_calls": [], "prefix": False}]}, ASKED + ANSWER),
    ({"messages": [USER, ASSISTANT, USER]}, f"{ASKED}{ANSWER}<think>Hm</think>Yes<|im_end|>\n{ASKED}{ANSWER}"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "expected"), PROMPTS)
def test_fields_of_a_prompt_reach_the_template(reader, fields, expected):
    assert prompt_of(reader, fields) == expected


TRIMMED = TEMPLATE.replace("{{ m.content }}", "{{ m.content | trim }}")
LONGER = "{% for m in messages %}{{ m.role }}: {{ m.content }}, {{ m.content | length }}.\n{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, TRIMMED, LONGER])
@pytest.mark.parametrize("content", ["It is ", "It is", " a\n\n", "a a"])
def test_a_message_is_continued_as_by_transformers(tokenizer, template, content):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    messages = [USER, {"role": "assistant", "content": content}]
    found = TemplateFormat(tokenizer, template, {}).prompt(messages, continues=True)
    assert found == theirs.apply_chat_template(
        messages, chat_template=template, continue_final_message=True, return_dict=False
    )


def test_a_template_that_does_not_write_the_last_message_cannot_continue_it(tokenizer):
    form = TemplateFormat(tokenizer, "{{ messages[0].content }}", {})
    with pytest.raises(em.ConfigError, match="does not write the text of the last message as it"):
        form.prompt(HALF, continues=True)


def test_our_own_format_has_the_same_ends():
    own = OwnFormat(train_tokenizer(["It is so. Hi "], vocab_size=300, marks=MARKS))
    asked = own.prompt([USER], asks=False)
    assert own.prompt([USER]) == [*asked, *own.prompt([])[1:]]
    text = own.prompt(HALF, continues=True)
    assert own.prompt(HALF, asks=False)[:-1] == text and text[: len(asked)] == asked


def extra(name, value):
    return {"role": "user", "content": "Hi", name: value}


BOTH = {"continue_final_message": True, "add_generation_prompt": True}
REFUSED_OF_CHATS = [
    ({"messages": HALF, **BOTH}, "continue_final_message"),
    *(({"chat_template_kwargs": {name: []}}, "chat_template_kwargs") for name in ("messages", "tools", "add_generation_prompt")),  # noqa: E501
    ({"chat_template_kwargs": {"a": ["<|im_end|>"]}}, "messages"),
    ({"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
    ({"messages": [extra("name", "\ud800")]}, "messages"),
    ({"messages": [extra("name", "<|im_end|>")]}, "messages"),
    ({"messages": [extra("function_call", {"name": "f"})]}, "messages.0.function_call"),
    ({"messages": [extra("tool_calls", [1])]}, "messages.0.tool_calls.0.type"),
    ({"messages": [extra("tool_calls", [{"function": {"name": "f", "arguments": "["}}])]}, "messages.0.tool_calls.0.function.arguments"),  # noqa: E501
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),  # which the template does not write
    ({"messages": [USER, {**USER, "prefix": True}]}, "messages.1.prefix"),
    ({"reasoning_effort": 3}, "reasoning_effort"),
    ({"add_special_tokens": True}, "add_special_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), REFUSED_OF_CHATS)
def test_a_conversation_is_refused_by_the_field(reader, fields, name):
    body = {"messages": [USER], **fields}
    for read, kind in ((reader.chat, ChatRequest), (reader.tokenize, TokenizeChat)):
        with pytest.raises(RequestError) as caught:
            read(kind.model_validate(body))
        assert caught.value.status == 400 and caught.value.param == name
        assert name in str(caught.value)


WITHOUT_EFFECT_ONCE = (  # accepted in former releases
    *("chat_template", "documents", "echo", "bad_words", "allowed_token_ids", "logits_processors", "length_penalty"),
    *("typical_p", "add_special_tokens", "truncate_prompt_tokens", "prompt_logprobs", "include_stop_str_in_output"),
    *("skip_special_tokens", "prompt_embeds", "enable_thinking", "thinking", "vllm_xargs", "structural_tag"),
    *("mirostat", "top_a", "tfs_z", "xtc_probability", "dry_multiplier", "grammar", "n_predict", "max_new_tokens"),
    *("stop_sequences", "repeat_penalty", "do_sample", "watermark"),
)  # fmt: skip
OTHER = {  # values with an effect, of fields whose usual one is no list
    "best_of": 2,
    "length_penalty": 2.0,
    "typical_p": 0.3,
    "skip_special_tokens": False,
    "prompt_logprobs": 0,
    "include_reasoning": False,
    "verbosity": "low",
    "truncate_prompt_tokens": -1,
    "tool_choice": "required",
    "do_sample": False,
    "detokenize": False,
}
OF_CHATS = ("tools", "tool_choice", "include_reasoning", "separate_reasoning", "verbosity")
AS_USUAL = {name for name, values in HARMLESS.items() if values is not ANY}


@pytest.mark.parametrize("name", sorted({*AS_USUAL, *INSTEAD, *WITHOUT_EFFECT_ONCE, "of_no_program"}))
def test_each_field_that_would_change_an_answer_is_refused_by_name(reader, name):
    """But for null, and the values that change nothing."""
    value = OTHER.get(name, True if HARMLESS.get(name) == (False,) else ["x"])
    kinds = [
        (ChatRequest, {"messages": [USER]}, reader.chat),
        (CompletionRequest, {"prompt": "Hi"}, reader.completion),
    ]
    for kind, body, read in kinds:
        if name in kind.model_fields or (kind is ChatRequest and name in OF_CHATS):
            continue
        plain = read(kind.model_validate(body))
        harmless = [None, *HARMLESS.get(name, ())]
        harmless += [kind is CompletionRequest] if name == "add_special_tokens" else []
        for one in harmless:
            assert read(kind.model_validate({**body, name: one})) == plain, one
        if name == "add_special_tokens":
            value = kind is not CompletionRequest
        said = f"^{name}: " + (f"its name here is {RENAMED[name]}$" if name in RENAMED else "")
        with pytest.raises(RequestError, match=said) as caught:
            read(kind.model_validate({**body, name: value}))
        assert caught.value.param == name


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 5, "max_new_tokens": 5, "n_predict": 5},
        {"stop": ["x"], "stop_sequences": ["x"]},
        {"min_tokens": 2, "min_new_tokens": 2},
        {"repetition_penalty": 1.1, "repeat_penalty": 1.1},
        {"temperature": 0, "do_sample": False},
        {"temperature": 0.5, "do_sample": True},
    ],
    ids=str,
)
def test_a_field_that_says_the_same_as_another_is_taken(reader, fields):
    known = {name: value for name, value in fields.items() if name in Sampling.model_fields}
    body = {"messages": [USER]}
    found = reader.chat(ChatRequest.model_validate(body | fields))
    assert found == reader.chat(ChatRequest.model_validate(body | known))


def test_an_effort_that_no_template_reads_is_named_in_a_header(reader, tmp_path):
    own = reader_of(train_tokenizer(["Hi "], vocab_size=300, marks=MARKS), tmp_path, None)
    body = {"messages": [USER]}
    plain = own.chat(ChatRequest.model_validate(body))
    for taken, unread in (
        ({"chat_template_kwargs": {"enable_thinking": True}}, ()),
        ({"reasoning_effort": None}, ()),
        ({"reasoning_effort": "low", "verbosity": "high"}, ("reasoning_effort", "verbosity")),
        ({"reasoning_effort": "none"}, ("reasoning_effort",)),
    ):
        job = own.chat(ChatRequest.model_validate(body | taken))
        assert job == replace(plain, without_effect=unread)
    for taken, unread, prompt in (  # of a template that reads an effort, and can turn thoughts off
        ({"reasoning_effort": "low", "verbosity": "low"}, ("verbosity",), f"low{ASKED}{ANSWER}"),
        ({"reasoning_effort": "none"}, (), f"{ASKED}{ANSWER}<think></think>"),
    ):
        job = reader.chat(ChatRequest.model_validate(body | taken))
        assert job.without_effect == unread
        assert prompt_of(reader, taken) == prompt


LONG = "few words " * 999
REFUSED_AT_ONCE = {
    "a prompt": (RequestReader.completion, CompletionRequest, {"prompt": LONG}, "prompt"),
    "one of several": (
        RequestReader.completion,
        CompletionRequest,
        {"prompt": ["a", LONG]},
        "prompt",
    ),
    "tokens of a text": (RequestReader.tokenize, TokenizeText, {"prompt": LONG}, "prompt"),
    "without a start": (
        RequestReader.tokenize,
        TokenizeText,
        {"prompt": LONG, "add_special_tokens": False},
        "prompt",
    ),
    "a message": (
        RequestReader.chat,
        ChatRequest,
        {"messages": [{**USER, "content": LONG}]},
        "messages",
    ),
    "several messages": (
        RequestReader.chat,
        ChatRequest,
        {"messages": [{**USER, "content": "few words " * 20}] * 20},
        "messages",
    ),
    "a variable": (
        RequestReader.chat,
        ChatRequest,
        {"messages": [USER], "reasoning_effort": LONG},
        "messages",
    ),
    "tokens of messages": (
        RequestReader.tokenize,
        TokenizeChat,
        {"messages": [{**USER, "content": LONG}]},
        "messages",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_ONCE)
def test_a_text_without_room_is_refused_before_it_is_tokenised(reader, name):
    read, kind, fields, param = REFUSED_AT_ONCE[name]
    refused = pytest.raises(RequestError, match=f"^{param}: .*the model has( no)? room")
    with calls_of(ids_of_text) as calls, refused as caught:
        read(reader, kind.model_validate(fields))
    assert all(len(call[0]["text"]) < 99 for call in calls)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, param, "context_length_exceeded")
    read(
        reader,
        kind.model_validate({**fields, param: [USER] if param == "messages" else "a", "reasoning_effort": None}),
    )


def test_a_template_that_does_not_end_is_an_error_of_its_request(tokenizer, tmp_path):
    ends = "{% if messages|length > 4 %}{{ 7 ** (messages|length * 10 ** 7) }}{% endif %}" + TEMPLATE
    reader = reader_of(tokenizer, tmp_path, ends)
    with pytest.raises(RequestError, match="^messages: the model's chat template takes") as caught:
        reader.chat(ChatRequest.model_validate({"messages": [USER] * 5}))
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "messages", "chat_template_limit")
    assert prompt_of(reader, {}) == ASKED + ANSWER
