"""Answers with thoughts and calls are parsed back to what a template wrote, however their text is cut."""

import json

import pytest
from tests.support.answer_templates import TEMPLATES
from tests.support.calls import calls_of

from expertmesh.errors import ConfigError
from expertmesh.text.answer_formats import FORMATS, AnswerReading, format_names, format_of
from expertmesh.text.answer_parsers import CallParser
from expertmesh.text.answer_pieces import (
    CallArguments,
    CallStart,
    Content,
    Thought,
    joined,
)
from expertmesh.text.chat_template import rendered

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "tags": {"type": "array"},
            "deep": {"type": "object"},
            "now": {"type": "boolean"},
            "none": {"type": ["string", "null"]},
        },
    },
    "stop": {"type": "object", "properties": {}},
}
HARD = {
    "city": 'a "b" \\ {x} é日\n\t</tool_call> 1,[2] <|x|> </think>',
    "days": -3,
    "tags": [1.5, "x", None, [True]],
    "deep": {"a": {"b": "}"}, "</arg": 0},
    "now": True,
    "none": None,
}
ONE = {
    "id": "aB3dE6gH9",
    "type": "function",
    "function": {"name": "get_weather", "arguments": HARD},
}
TWO = {"id": "bB3dE6gH9", "type": "function", "function": {"name": "stop", "arguments": {}}}
ASKED = {"role": "user", "content": "hi"}
KIMI_IDS = {"get_weather": "functions.get_weather:0", "stop": "functions.stop:1"}


def parser_of(name, *, is_open=False, **options):
    """Parser of thoughts and calls of a template."""
    template = TEMPLATES[name]
    thoughts, calls = (format_of(kind, template) for kind in ("thoughts", "calls"))
    assert name in calls.names
    return AnswerReading(thoughts, calls, TOOLS, is_open=is_open, **options)()


def said(parser, *texts):
    """Content, thoughts and calls of an answer."""
    pieces = joined([*(p for text in texts for p in parser.feed(text)), *parser.finish()])
    content, thought = ("".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Content, Thought))
    calls = [[p.name, "", p.call_id] for p in pieces if isinstance(p, CallStart)]
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index][1] += piece.text
    assert [p.index for p in pieces if isinstance(p, CallStart)] == [*range(len(calls))]
    return content, thought, calls


def written(name, message):
    """Text of an answer as its template writes it, and whether its prompt opens a thought."""
    texts = []
    for messages, asks in (([ASKED], True), ([ASKED, message], False)):
        values = {"messages": messages, "tools": None, "add_generation_prompt": asks}
        values |= {"bos_token": "<s>", "eos_token": "</s>"}
        texts.append(rendered(TEMPLATES[name], values, most_characters=10**6))
    before, whole = texts
    if not whole.startswith(before):  # a template whose prompt opens the thought
        before = before.removesuffix("<think>\n")
    assert whole.startswith(before)
    text = whole[len(before) :].rstrip("\n")
    ends = ("<|im_end|>", "[e~[", "<｜end▁of▁sentence｜>", "<|call|>", "<|return|>", "</s>")
    for end in (*ends, "<|eot_id|>", "<|end_of_text|>"):
        text = text.removesuffix(end)
    thoughts = format_of("thoughts", TEMPLATES[name])
    return text, thoughts is not None and thoughts.thoughts.is_open(before)


def message_of(name, calls, thought, content):
    calls = [{**one, "function": {**one["function"]}} for one in calls]
    for one in calls:
        if name == "kimi_k2":
            one["id"] = KIMI_IDS[one["function"]["name"]]
        if name in ("deepseek_v3", "deepseek_v31"):
            arguments = json.dumps(one["function"]["arguments"], ensure_ascii=False)
            one["function"]["arguments"] = arguments
    message = {"role": "assistant", "content": content, "tool_calls": calls}
    return message | ({"reasoning_content": thought, "thinking": thought} if thought else {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_answers_are_parsed_back_at_every_cut(name):
    lone = name in ("llama3_json",)
    hard = dict(HARD)
    if name in ("qwen3_coder", "glm45", "minimax_m2", "llama3_json", "seed_oss"):
        del hard["none"]  # "null" of a text or null
    first = {**ONE, "function": {"name": "get_weather", "arguments": hard}}
    has_thoughts = format_of("thoughts", TEMPLATES[name]) is not None
    thoughts = ("", "hm,\n\nwell <tool") if has_thoughts else ("",)
    contents = (None,) if lone or name in ("deepseek_v3", "pythonic") else (None, "so < be it:\n\n- a")
    for calls in ([first], [TWO], [first, TWO]):
        if lone and len(calls) > 1 or (name == "openai" and len(calls) > 1):
            continue
        for thought in thoughts:
            for content in contents:
                text, is_open = written(name, message_of(name, calls, thought, content))
                got = said(parser_of(name, is_open=is_open), text)
                assert got[:2] == (content or "", thought), (text, got)
                found = [(one, json.loads(arguments)) for one, arguments, _ in got[2]]
                want = [(c["function"]["name"], c["function"]["arguments"]) for c in calls]
                assert found == want, text
                if name == "mistral":
                    assert [i for *_, i in got[2]] == [c["id"] for c in calls]
                if name == "kimi_k2":
                    assert [i for *_, i in got[2]] == [KIMI_IDS[called] for called, *_ in got[2]]
                ids = [[a, b] for a, b, _ in got[2]]
                for parts in ([text[:at], text[at:]] for at in range(len(text))):
                    again = said(parser_of(name, is_open=is_open), *parts)
                    assert again[:2] == got[:2], parts
                    assert [[a, b] for a, b, _ in again[2]] == ids, parts
                again = said(parser_of(name, is_open=is_open), *text)
                assert (*again[:2], [[a, b] for a, b, _ in again[2]]) == (*got[:2], ids)


GOOD = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
NO_CALLS = {
    "hermes": [
        "plain {text} [1] < <tool",
        "\n\n blanks \n",
        "",
        " ",
        "the tag <tool_call> is for calls",
        '<tool_call>\n{"name": "stop", "arguments": {"a": 1',
        '<tool_call>\n{"name": "nobody", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {"a": NaN}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {"a": ' + "9" * 5000 + "}}\n</tool_call>",
        '<tool_call>\n{"name": "stop", "arguments": {"a": ' + "[" * 9999 + "}}\n</tool_call>",
        '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
        "<tool_call></tool_call>",
        '<tool_call>{"name": "stop", "arguments": {}} too much</tool_call>',
        "</tool_call><tool_call>",
    ],
    "qwen3_coder": [
        "<tool_call>\n<function=nobody>\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=stop>",
    ],
    "glm45": ["<tool_call>nobody\n</tool_call>", "<tool_call>stop\n<arg_key>a</arg_key>\n</tool_call>"],
    "minimax_m2": ['<minimax:tool_call>\n<invoke name="stop">\n</minimax:tool_call>'],
    "deepseek_v3": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n{}\n``",
        "<｜tool▁calls▁begin｜>",
    ],
    "deepseek_v31": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{<｜tool▁call▁end｜>"],
    "mistral": ["[TOOL_CALLS] no", '[TOOL_CALLS][{"name": "nobody", "arguments": {}}]', "[TOOL_CALLS][]"],
    "mistral_v11": ["[TOOL_CALLS]stop[ARGS]", "[TOOL_CALLS]nobody[ARGS]{}", "[TOOL_CALLS]stop[ARGS]{} more"],
    "llama3_json": ['{"name": "nobody", "parameters": {}}', '{"a": 1}', "{", "<|python_tag|>print(1)", '{"name": "stop"} so'],  # noqa: E501
    "kimi_k2": ["<|tool_calls_section_begin|><|tool_call_begin|>functions.nobody:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"],  # noqa: E501
    "granite": ["<|tool_call|>[1]", "[1, 2]"],
    "pythonic": ["[stop()] is a call", "[1, 2]", "[", "[]", "[nobody()]", "[stop(1)]", "[stop(**{})]", "[stop(a=open)]",
                 "[stop(a=stop())]", "[stop(a=1 + 1)]", "[stop(a={1})]", "[stop(a=b'x')]", "[stop(a=1e999)]", "stop()",
                 "[stop(a='\\ud800')]", "[stop(a=" + "[" * 9999, "[stop(a=" + "9" * 5000 + ")]", "[stop(a='\0')]"],
    "lfm2": ["<|tool_call_start|>stop()<|tool_call_end|>", "<|tool_call_start|>[stop(a='<|tool_call_end|>"],
    "deepseek_v32": ['<｜DSML｜function_calls><｜DSML｜invoke name="stop">'],
    "openai": ["plain words", "  <|x|> words"],
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CALLS)
def test_text_that_is_no_call_stays_text(name):
    for text in NO_CALLS[name]:
        cuts = range(len(text)) if len(text) < 200 else (1, 50)
        for parts in ([text], [*text], *([text[:at], text[at:]] for at in cuts)):
            assert said(parser_of(name), *parts) == (text, "", []), parts


def test_good_calls_beside_bad_ones():
    for text, content in (
        (f"<tool_call>oops {GOOD}", "<tool_call>oops"),
        (f"{GOOD}\n<tool_call>oops</tool_call>", "<tool_call>oops</tool_call>"),
        (f"a\n{GOOD}\n\nb\n", "ab\n"),
    ):
        for parts in ([text], [*text]):
            got = said(parser_of("hermes"), *parts)
            assert got[0] == content
            assert [name for name, *_ in got[2]] == ["stop"]
    got = said(parser_of("hermes", most=1), f"{GOOD}\n{GOOD}")
    assert (got[0], len(got[2])) == ("", 1)


def test_answers_of_many_broken_calls_are_read_in_linear_time():
    texts = (
        "<tool_call>{",
        '<tool_call>{"name": "stop", "arguments": {"a": "</tool_call>',
        "</tool_call>",
    )
    for text in (*(one * 300 for one in texts), texts[1] + texts[2] * 300):
        with calls_of(CallParser._read) as reads:
            for parts in ([text], [*text]):
                assert said(parser_of("hermes"), *parts) == (text, "", [])
        assert len(reads) < 300


def test_harmony_as_models_write_it():
    call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    for text, want in (
        ("<|channel|>final<|message|>a", ("a", "", [])),
        ("<|channel|>analysis<|message|>t<|end|><|start|>assistant" + call, ("", "t", ["stop"])),
        ("<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a", ("a", "t", [])),
        ("<|channel|>commentary<|message|>p<|end|><|start|>assistant" + call, ("p", "", ["stop"])),
        (" to=functions.stop<|channel|>commentary json<|message|>{}", ("", "", ["stop"])),
        (call + "<|call|>", ("", "", ["stop"])),
        ("<|channel|>analysis<|message|>t", ("", "t", [])),
        ("<|channel|>fin", ("", "", [])),
    ):  # fmt: skip
        for parts in ([text], [*text]):
            content, thought, calls = said(parser_of("openai"), *parts)
            assert (content, thought, [name for name, *_ in calls]) == want, parts
    unfinished = call[:-1]
    assert "to=functions.stop" in said(parser_of("openai"), unfinished)[0]


def test_thoughts_that_the_prompt_opens():
    tags = format_of("thoughts", TEMPLATES["hermes"]).thoughts
    for prompt, is_open in (
        ("<|im_start|>assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
    ):
        assert tags.is_open(prompt) is is_open
    for text, want in (
        ("t </think>\n\na", ("a", "t", [])),
        ("\n t", ("", "t", [])),
        ("t</think", ("", "t</think", [])),
        ("</think>a", ("a", "", [])),
    ):
        for parts in ([text], [*text]):
            assert said(parser_of("hermes", is_open=True), *parts) == want, parts
    assert said(parser_of("hermes"), "a <think>b</think>") == ("a <think>b</think>", "", [])


def test_values_of_tagged_calls_by_type():
    text = "<tool_call>\n<function=get_weather>\n{}</function>\n</tool_call>"
    for key, value, want in (
        ("city", "5", "5"),
        ("city", "\n a\n", "\n a\n"),
        ("days", "5", 5),
        ("days", "many", "many"),
        ("now", "True", True),
        ("now", "false", False),
        ("tags", "[1, 2]", [1, 2]),
        ("none", "null", None),
        ("none", "7", "7"),
        ("unknown", "7", 7),
        ("unknown", '"7"', '"7"'),
        ("unknown", "None", None),
        ("tags", "[1.5, 'x', True, None]", [1.5, "x", True, None]),
        ("deep", "{'a': open}", "{'a': open}"),
        ("city", "['a']", "['a']"),
    ):
        one = f"<parameter={key}>\n{value}\n</parameter>\n"
        (call,) = said(parser_of("qwen3_coder"), text.format(one))[2]
        assert json.loads(call[1]) == {key: want}


def test_calls_as_python_writes_them():
    for text, want in (
        ("[stop()]", {}),
        ("<|python_start|>[stop()]<|python_end|>", {}),
        ("""[stop(a='x "y"', b=-1, c=[True, None], d={'e': 1.5})]""", {"a": 'x "y"', "b": -1, "c": [True, None], "d": {"e": 1.5}}),  # noqa: E501
        ("[stop(a=true, b=null, c=(1, 2), d='\\d')]", {"a": True, "b": None, "c": [1, 2], "d": "\\d"}),
    ):  # fmt: skip
        for parts in ([text], [*text]):
            content, _, calls = said(parser_of("pythonic"), *parts)
            assert (content, [json.loads(call[1]) for call in calls]) == ("", [want]), parts


def test_formats_by_name():
    assert format_of("calls", HARD["city"]) is None
    assert format_of("calls", TEMPLATES["hermes"], "none") is None
    assert "glm45" in format_of("calls", "", "glm45").names
    for kind in ("thoughts", "calls"):
        names = format_names(kind)
        assert len({*names}) == len(names)
        with pytest.raises(ConfigError, match=r"parser=x: must be one of none, .*choose one"):
            format_of(kind, "", "x")
    assert all(one.thoughts or one.calls for one in FORMATS)
