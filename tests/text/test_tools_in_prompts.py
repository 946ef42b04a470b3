"""Prompts with tools and histories with calls are those of transformers, for templates of all families."""

import json

import pytest
from tests.support.answer_templates import TEMPLATES
from tests.support.byte_tokenizer import byte_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from expertmesh.engine.chat import conversation_ids
from expertmesh.errors import ConfigError
from expertmesh.text.chat import OwnFormat, TemplateFormat
from expertmesh.text.format import TextFormat
from expertmesh.text.template_messages import CallForm, forms_of
from expertmesh.text.tools import MOST_TOOLS, fitting_id, read_calls, read_tools

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": 'Says "how" it is, é',
        "strict": True,
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ARGUMENTS = {"city": "Zürich <b>", "days": [1, None, True]}
CALL = {
    "id": "aB3dE6gH9",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)},
}
ASKED = {"role": "user", "content": "How is it?"}
ANSWERED = {"role": "tool", "tool_call_id": CALL["id"], "name": "get_weather", "content": "dry"}
EMPTY, NULL = {"content": ""}, {"content": None}


def formats(name, special=("<|endoftext|>",)):
    """Text format of a template, and transformers' tokenizer of it."""
    tokenizer = byte_tokenizer(special)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    theirs = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    theirs.chat_template = TEMPLATES[name]
    chat = TemplateFormat(tokenizer, TEMPLATES[name], names)
    return TextFormat(tokenizer, (), (tokenizer.token_to_id("<|endoftext|>"),), chat), theirs


def history(name, content, *more):
    return [
        ASKED,
        {"role": "assistant", "content": content, "tool_calls": [CALL], **dict(more)},
        ANSWERED,
        {"role": "assistant", "content": "It is dry."},
        ASKED,
    ]


def transformers_ids(theirs, messages, *, is_null=False):
    """Their tokens of a conversation with a tool; `is_null`: of a template that asks whether a content is None."""
    options = {"tools": [TOOL], "add_generation_prompt": True}
    if not is_null:  # their method leaves every None out
        return theirs.apply_chat_template(messages, **options, return_dict=False)
    options |= {"chat_template": theirs.chat_template, **theirs.special_tokens_map}
    (text,), _ = render_jinja_template([messages], **options)
    return theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_with_tools_are_those_of_transformers(name):
    ours, theirs = formats(name)
    is_text = name in ("deepseek_v3", "deepseek_v31")
    call = {**CALL, "function": {**CALL["function"]}}
    call["function"]["arguments"] = CALL["function"]["arguments"] if is_text else ARGUMENTS
    for content in (None, "Let me see"):
        if content and name in ("deepseek_v3", "llama3_json"):
            continue  # which write no content beside calls
        for more in ((), (("reasoning_content", "Hm."), ("thinking", "Hm."))):
            talk = history(name, content, *more)
            plain = [{**m, "tool_calls": [call]} if "tool_calls" in m else m for m in talk]
            for end in (3, 5):
                want = transformers_ids(theirs, plain[:end], is_null=name == "deepseek_v3")
                got = conversation_ids(ours, talk[:end], tools=[TOOL])
                assert got == want, ours.tokenizer.decode(got)
    text = ours.tokenizer.decode(got)
    for word in ("Zürich", "get_weather", "dry"):
        assert word in text
    tool = dict(TOOL)
    asked = theirs.apply_chat_template([ASKED], tools=[tool], add_generation_prompt=True, return_dict=False)
    assert conversation_ids(ours, [ASKED], tools=(tool,)) == asked
    assert conversation_ids(ours, [ASKED], tools=[]) == conversation_ids(ours, [ASKED])


def test_histories_of_other_clients():
    for name in TEMPLATES:
        ours, _ = formats(name)
        want = conversation_ids(ours, history(name, None)[:3])
        odd = {**CALL, "index": 0, "type": None}
        odd["function"] = {**CALL["function"], "arguments": ARGUMENTS}
        for content in ("", None, []):
            talk = [ASKED, {"role": "assistant", "content": content, "tool_calls": [odd]}, ANSWERED]
            assert conversation_ids(ours, talk) == want, name
        del talk[1]["content"]
        assert conversation_ids(ours, talk) == want, name
        assert conversation_ids(ours, [ASKED, {"role": "assistant", "content": None}, ASKED])
    ours, _ = formats("mistral")
    texts = []
    for call_id in ("call_0123456789abcdefghijklmn", "fghijklmn", "call_1"):
        talk = [ASKED, {"role": "assistant", "tool_calls": [{**CALL, "id": call_id}]}]
        talk.append({**ANSWERED, "tool_call_id": call_id})
        texts.append(ours.tokenizer.decode(conversation_ids(ours, talk)))
        assert texts[-1].count(fitting_id(call_id, 9)) == 2
    assert texts[0] == texts[1] != texts[2]


def test_forms_that_templates_write():
    known = {
        "hermes": [CallForm(False, {}), CallForm(False, EMPTY), CallForm(False, NULL)],
        "deepseek_v3": [CallForm(True, NULL)],
        "deepseek_v31": [CallForm(True, {}), CallForm(True, EMPTY), CallForm(True, NULL)],
    }
    for name, want in known.items():
        ours, _ = formats(name)
        assert ours.chat._call_forms == want
    for source, want in (
        (
            "{{ messages[1].tool_calls | tojson }}{{ messages[1].content }}",
            [CallForm(False, {}), CallForm(False, EMPTY)],
        ),
        ("{{ messages[1].tool_calls[0].function.name }}", []),
    ):
        tokenizer = byte_tokenizer()
        chat = TemplateFormat(tokenizer, source, {})
        assert forms_of(lambda m, c=chat: c._render_as_it_is(m, None)) == want


WRONG_TOOLS = [
    ({"a": 1}, "tools: must be a list of tools"),
    ([1], "tools.0.type: must be function"),
    ([{"type": "web_search"}], "tools.0.type: must be function"),
    ([{"type": "function"}], "tools.0.function: must be an object with a name"),
    ([{"type": "function", "function": {}}], "tools.0.function.name: must be a name"),
    ([{"type": "function", "function": {"name": "a b"}}], "tools.0.function.name: must be a name"),
    ([{"type": "function", "function": {"name": "a" * 65}}], "tools.0.function.name: must be a name"),
    ([TOOL, TOOL], "tools.1.function.name: 'get_weather' is the name of tool 0, too"),
    *(
        ([{"type": "function", "function": {"name": "a", "parameters": given}}], f"tools.0.function.parameters{place}")
        for given, place in (
            ("no", ": must be a JSON schema"),
            ([], ": must be a JSON schema"),
            ({"type": "string"}, ".type: must be object"),
            ({"type": "object", "properties": []}, ".properties: must be schemas by name"),
            ({"properties": {"x": 1}}, ".properties.x: must be a schema"),
        )
    ),
    ([{"type": "function", "function": {"name": "a", "strict": "no"}}], "tools.0.function.strict: must be true or false"),  # noqa: E501
    ([{"type": "function", "function": {"name": "a", "description": 1}}], "tools.0.function.description: must be text"),
    ([{"type": "function", "function": {"name": f"f{i}"}} for i in range(MOST_TOOLS + 1)], "tools: has 129 tools; give at most 128"),  # noqa: E501
]  # fmt: skip


def test_wrong_tools_are_one_line_with_their_place():
    for given, want in WRONG_TOOLS:
        with pytest.raises(ConfigError) as caught:
            read_tools(given)
        assert str(caught.value).startswith(want) and "\n" not in str(caught.value)
    assert read_tools([]) == []
    assert read_tools([TOOL]) == [TOOL]


def test_wrong_calls_are_one_line_with_their_place():
    for given, want in (
        ("no", "x: must be a list"),
        ([1], "x.0.type: must be function"),
        ([{"type": "custom"}], "x.0.type: must be function"),
        ([{"id": 3, "function": {"name": "a"}}], "x.0.id: must be text"),
        ([{"function": {}}], "x.0.function.name: must be text"),
        ([{"function": {"name": "a", "arguments": "{"}}], "x.0.function.arguments: is no JSON"),
        ([{"function": {"name": "a", "arguments": "[1]"}}], "x.0.function.arguments: must be an object"),
        ([{"function": {"name": "a", "arguments": 5}}], "x.0.function.arguments: must be an object"),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            read_calls(given, "x")
        assert str(caught.value).startswith(want)
    (call,) = read_calls([{"function": {"name": "a", "arguments": ""}}], "x")
    assert call["function"]["arguments"] == {}


def test_models_without_tools_say_so():
    tokenizer = byte_tokenizer()
    text = TextFormat(tokenizer, (), (0,), OwnFormat(tokenizer))
    plain = TemplateFormat(tokenizer, "{{ messages[0].content }}", {})
    other = TextFormat(tokenizer, (), (0,), plain)
    for one in (text, other):
        for talk, tools, word in (
            ([ASKED], [TOOL], "tools"),
            (history("", None), None, "messages"),
        ):
            with pytest.raises(ConfigError, match=rf"^(messages|{word}): "):
                conversation_ids(one, talk, tools=tools)
