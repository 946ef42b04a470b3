"""Tools and thoughts in chats: what requests may say, what answers look like, and the round trip of OpenAI's client."""

import json
import re

import openai
import pytest
from tests.support.answer_templates import TEMPLATES
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.hub_text import hub_folder
from tests.support.serving import served

import expertmesh as em
from expertmesh.config.server import ServerConfig
from expertmesh.engine.guided_calls import GuidedCalls
from expertmesh.engine.output import RequestOutput
from expertmesh.errors import ConfigError
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import RequestReader
from expertmesh.serve.schema import ChatRequest, TokenizeChat
from expertmesh.serve.writing import TokenTexts, Writer
from expertmesh.text.answer_formats import FORMATS, AnswerReading, format_of
from expertmesh.text.format import text_format
from expertmesh.text.stream import TextStream
from expertmesh.text.tokenizer import load_tokenizer

USER = {"role": "user", "content": "Hi"}
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name, parameters=EMPTY, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


TOOLS = [tool("weather", CITY, strict=True), tool("stop")]
NAMED = {"type": "function", "function": {"name": "weather"}}
MARKS = (
    "<|endoftext|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[THINK]",
    "[/THINK]",
    "<|channel|>",
    "<|message|>",
    "<|start|>",
    "<|end|>",
    "<|call|>",
    "<|constrain|>",
    "<|return|>",
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Readers of requests, by the format of the template."""
    config = em.recipe("gpt-moe-test", {"model.max_seq_len": 1024}).model
    model = em.GPT(config, seed=0).eval()
    found = {}

    def reader_of(name, **options):
        if (name, *options.values()) not in found:
            folder = tmp_path_factory.mktemp(name)
            path = folder / "tokenizer.json"
            byte_tokenizer(MARKS).save(str(path))
            (folder / "chat_template.jinja").write_text(TEMPLATES[name])
            names = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
            (folder / "tokenizer_config.json").write_text(json.dumps(names))
            engine = em.Engine(model, load_tokenizer(path), num_blocks=64)
            engine.text = text_format(engine.text.tokenizer, path, model=engine.model)
            found[name, *options.values()] = RequestReader(engine, ServerConfig(**options), "m")
        return found[name, *options.values()]

    return reader_of


def job_of(reader, **fields):
    return reader.chat(ChatRequest.model_validate({"messages": [USER], **fields}))


def written(reader, ids):
    return reader.text.tokenizer.decode(ids, skip_special_tokens=False)


ALLOWED = {"mode": "required", "tools": [NAMED]}


@pytest.mark.parametrize(
    ("choice", "callable", "must", "most"),
    [
        (None, ["weather", "stop"], False, None),
        ("auto", ["weather", "stop"], False, None),
        ("none", [], False, None),
        ("required", ["weather", "stop"], True, None),
        (NAMED, ["weather"], True, 1),
        ({"type": "allowed_tools", "allowed_tools": ALLOWED}, ["weather"], True, None),
        ({"type": "allowed_tools", "allowed_tools": {**ALLOWED, "mode": "auto"}}, ["weather"], False, None),
    ],
    ids=str,
)  # fmt: skip
def test_choices_of_tools(readers, choice, callable, must, most):
    for name in ("hermes", "glm45", "llama3_json"):
        reader = readers(name)
        fields = {"tools": TOOLS} | ({} if choice is None else {"tool_choice": choice})
        job = job_of(reader, **fields)
        text = written(reader, job.prompts[0])
        assert '"weather"' in text and '"stop"' in text  # a prompt is the same whatever may be called
        body = {"messages": [USER], **fields}
        assert reader.tokenize(TokenizeChat.model_validate(body)) == job.prompts[0]
        assert list(job.make_parser.tools) == callable
        assert job.make_parser.most == most
        guided = job.params[0].json_schema
        assert isinstance(guided, GuidedCalls) is must
        assert (job.guide is not None and job.guide.field == "tools") is must
        own = name != "glm45"  # whose syntax has no markup for guided calls
        if must:
            assert (name if own else "json") in guided.reading.calls.names
        one = job_of(reader, **fields, parallel_tool_calls=False)
        assert one.make_parser.most == 1
        assert job_of(reader, **fields, parallel_tool_calls=True) == job
        asked = {"type": "json_object"}
        either = job_of(reader, **fields, response_format=asked).params[0].json_schema
        assert isinstance(either, GuidedCalls) is bool(callable)
        if callable:
            assert either.answer == (None if must else {"type": "object"})
            told = name == "hermes" or (must and own)  # Llama's calls begin as a JSON object does
            assert (name if told else "json") in either.reading.calls.names


def test_tools_where_the_template_writes_none(tmp_path):
    path = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(path))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    config = em.recipe("gpt-moe-test").model
    engine = em.Engine(em.GPT(config, seed=0).eval(), load_tokenizer(path), num_blocks=8)
    engine.text = text_format(engine.text.tokenizer, path, model=engine.model)
    reader = RequestReader(engine, ServerConfig(), "m")
    plain = job_of(reader)
    assert job_of(reader, tools=TOOLS, tool_choice="none") == plain
    assert job_of(reader, tools=TOOLS, tool_choice="required").prompts == plain.prompts
    with pytest.raises(RequestError, match="^tools: the model's chat template does not write"):
        job_of(reader, tools=TOOLS)


BAD = [
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tools": [*TOOLS, tool("stop")]}, "tools.2.function.name"),
    ({"tools": [tool("a", "text")]}, "tools.0.function.parameters"),
    ({"tools": [tool("a", {"properties": []})]}, "tools.0.function.parameters.properties"),
    ({"tools": [tool("a", {"type": "array"})]}, "tools.0.function.parameters.type"),
    ({"tools": "no"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 3}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools.mode"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice.allowed_tools.tools"),  # noqa: E501
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"include_reasoning": "no"}, "include_reasoning"),
    ({"verbosity": 1}, "verbosity"),
    ({"functions": [1]}, "functions"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "name"), BAD, ids=str)
def test_bad_tools_are_one_line_with_the_fields_path(readers, fields, name):
    with pytest.raises(RequestError) as caught:
        job_of(readers("hermes"), **fields)
    assert (caught.value.status, caught.value.param) == (400, name)
    assert str(caught.value).startswith(f"{name}: ") and "\n" not in str(caught.value)


def test_parameters_that_are_null_are_none(readers):
    reader = readers("hermes")
    nulls = {"type": None, "properties": None, "required": None, "description": None}
    told = job_of(reader, tools=[tool("a", nulls)], tool_choice="required")
    plain = job_of(reader, tools=[tool("a", {})], tool_choice="required")
    assert told.make_parser == plain.make_parser and told.make_parser.tools == {"a": {"type": "object"}}
    assert reader.with_rules(told).guide is None


def test_a_schema_of_a_tool_that_cannot_be_kept_is_named(readers):
    reader = readers("hermes")
    bad = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    job = job_of(reader, tools=[tool("a", bad)], tool_choice="required")
    with pytest.raises(RequestError, match="^tools: .*uniqueItems") as caught:
        reader.with_rules(job)
    assert caught.value.param == "tools"
    assert job_of(reader, tools=[tool("a", bad)]).guide is None


def outputs_of(job, text, cuts):
    """Outputs of an engine that wrote a text."""
    for end in cuts:
        yield RequestOutput("0", 0, (5,), tuple(range(end)), text[:end], None)
    yield RequestOutput("0", 0, (5,), tuple(range(len(text))), text, "stop")


def streamed(reader, job, text, cuts):
    """Message that the deltas of a stream add up to, and the finish reason."""
    texts = TokenTexts(reader.text.tokenizer)
    writer = Writer(job, "m", texts, wants_logprobs=False, wants_ids=True, is_chat=True)
    message, calls, ids, reason = {}, {}, [], None
    for output in outputs_of(job, text, cuts):
        for event in writer.chunks(0, output):
            (choice,) = event["choices"]
            assert reason is None
            reason = choice["finish_reason"]
            ids += choice.get("token_ids", [])
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
                    continue
                (call,) = value
                if call["index"] not in calls:
                    assert set(call) == {"index", "id", "type", "function"}
                    assert call["function"]["arguments"] == ""
                    calls[call["index"]] = call
                else:
                    assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                    known = calls[call["index"]]["function"]
                    known["arguments"] += call["function"]["arguments"]
    assert ids == [*range(len(text))]
    return message, [calls[i]["function"] for i in range(len(calls))], reason


def whole(reader, job, text):
    texts = TokenTexts(reader.text.tokenizer)
    writer = Writer(job, "m", texts, wants_logprobs=False, wants_ids=False, is_chat=True)
    *_, last = outputs_of(job, text, ())
    (choice,) = writer.whole({0: last})["choices"]
    return choice["message"], choice["finish_reason"]


CALLS = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n<tool_call>\n{"name": "stop", '
    '"arguments": {}}\n</tool_call>'
)
ANSWERS = [
    (f"<think>\nhm\n</think>\n\nSo:\n{CALLS}", "So:", "hm", ["weather", "stop"]),
    (CALLS, None, "", ["weather", "stop"]),
    ("<think>\nhm\n</think>\n\nyes", "yes", "hm", []),
    ("<think>\nhm", "", "hm", []),
    ('<tool_call>\n{"name": "weather"', '<tool_call>\n{"name": "weather"', "", []),
    ("yes", "yes", "", []),
]


@pytest.mark.parametrize(("text", "content", "thought", "names"), ANSWERS)
def test_answers_whole_and_at_every_cut(readers, text, content, thought, names):
    reader = readers("hermes")
    job = job_of(reader, tools=TOOLS)
    message, reason = whole(reader, job, text)
    assert message["role"] == "assistant" and message["content"] == content
    assert message.get("reasoning_content", "") == message.get("reasoning", "") == thought
    calls = message.get("tool_calls", [])
    assert [call["function"]["name"] for call in calls] == names
    assert reason == ("tool_calls" if names else "stop")
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function" and call["id"].startswith("call_")
    for cuts in (*([at] for at in range(len(text))), range(len(text))):
        delta, functions, ended = streamed(reader, job, text, cuts)
        assert (delta["content"], ended) == (content or "", reason)
        assert delta.get("reasoning_content", "") == delta.get("reasoning", "") == thought
        assert functions == [call["function"] for call in calls]
    hidden = job_of(reader, tools=TOOLS, include_reasoning=False)
    assert "reasoning" not in whole(reader, hidden, text)[0]
    for job in (
        job_of(reader, tools=TOOLS, separate_reasoning=False),
        job_of(readers("hermes", reasoning_parser="none"), tools=TOOLS),
    ):
        message, _ = whole(reader, job, text)
        assert "reasoning_content" not in message
        if thought:
            assert "<think>\nhm" in message["content"]
    off = readers("hermes", tool_call_parser="none", reasoning_parser="none")
    assert whole(off, job_of(off, tools=TOOLS), text)[0] == {"role": "assistant", "content": text}
    unasked = whole(reader, job_of(reader, tools=TOOLS, tool_choice="none"), text)[0]
    assert "tool_calls" not in unasked


def test_ids_that_mistrals_templates_take(readers):
    reader = readers("mistral_v11")
    job = job_of(reader, tools=TOOLS)
    kept = [reader.text.tokenizer.id_to_token(i) for i in job.params[0].kept_special_ids]
    assert set(kept) == {"[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"}
    text = "[THINK]hm[/THINK][TOOL_CALLS]weather[ARGS]{}[TOOL_CALLS]stop[ARGS]{}"
    message, _ = whole(reader, job, text)
    ids = [call["id"] for call in message["tool_calls"]]
    assert len({*ids}) == 2 and all(len(one) == 9 and one.isalnum() for one in ids)
    results = [{"role": "tool", "tool_call_id": one, "content": "dry"} for one in ids]
    again = written(reader, job_of(reader, messages=[USER, message, *results]).prompts[0])
    assert all(again.count(one) == 1 for one in ids) and "[THINK]hm[/THINK]" in again


def test_special_tokens_are_in_the_text_only_where_they_are_marks(readers):
    reader = readers("openai")
    tokenizer = reader.text.tokenizer
    ids = ids_of(tokenizer, "<|channel|>final<|message|>a[ARGS]")
    kept = job_of(reader).params[0].kept_special_ids
    for known, want in ((kept, "<|channel|>final<|message|>a"), ((), "finala")):
        stream = TextStream(tokenizer, known)
        assert "".join(map(stream.feed, ids)) == want
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    assert whole(reader, job_of(reader), text)[0]["content"] == "yes"


def grammar_of(reader, job):
    """Lark grammar of a job's guided calls."""
    return job.params[0].json_schema.grammar(dict, {})


def test_thoughts_that_the_prompt_opens_or_closes(readers):
    reader = readers("minimax_m2")
    message, _ = whole(reader, job_of(reader), "hm\n</think>\n\nyes")
    assert (message["content"], message["reasoning"]) == ("yes", "hm")
    message, _ = whole(reader, job_of(reader, response_format={"type": "json_object"}), "{}")
    assert message["content"] == "{}"
    off = job_of(readers("hermes"), reasoning_effort="none", tools=TOOLS, tool_choice=NAMED)
    assert off.make_parser.thoughts is None and "thought" not in grammar_of(readers("hermes"), off)
    on = job_of(readers("hermes"), tools=TOOLS, tool_choice=NAMED)
    assert "[thought]" in grammar_of(readers("hermes"), on)
    said = [USER, {"role": "assistant", "content": "<think>so"}]
    job = job_of(readers("hermes"), messages=said, continue_final_message=True)
    assert whole(reader, job, " hm</think>yes")[0]["content"] == "yes"


def ids_of(tokenizer, text):
    """Tokens of a text with special tokens."""
    parts = re.split(f"({'|'.join(map(re.escape, MARKS))})", text)
    given = [[tokenizer.token_to_id(one)] if one in MARKS else tokenizer.encode(one).ids for one in parts]
    return [i for ids in given for i in ids]


def drawn(reader, calls, wish):
    """Text of an answer that a rule allows: a wish first, then the first of the allowed bytes."""
    rule = reader._engine.answer_rules.compiled("json_schema", calls).rule()
    tokenizer, ids = reader.text.tokenizer, []
    closing = tokenizer.token_to_id("]")
    for one in ids_of(tokenizer, wish):
        assert rule.allowed(ids)[one], wish
        ids.append(one)
    for _ in range(400):
        allowed = rule.allowed(ids).nonzero()[0].tolist()
        if set(allowed) & rule.end_ids:
            break
        ids.append(closing if closing in allowed else allowed[0])
    stream = TextStream(tokenizer, range(tokenizer.get_vocab_size()))
    return "".join(map(stream.feed, ids)), rule, ids


GUIDED = [one for one in FORMATS if one.calls is not None and one.calls.markup is not None]


@pytest.mark.parametrize("form", GUIDED, ids=lambda one: one.names[0])
def test_guided_calls_are_parsed_back(readers, form):
    reader = readers("hermes")
    tools = {"weather": CITY, "stop": EMPTY}
    thoughts = format_of("thoughts", TEMPLATES["mistral"], None)
    for most, first, wish in ((1, None, ""), (None, None, ""), (1, thoughts, "[THINK]hm[/THINK]")):
        calls = GuidedCalls(AnswerReading(first, form, tools, most))
        text, rule, ids = drawn(reader, calls, wish)
        found = json.loads(calls.listed(text))
        assert len(found) == 1 and found[0]["name"] in tools, text
        assert rule.problem(ids) is None
        wrong = json.dumps([{"name": "weather", "arguments": {"city": "Rome"}}])
        assert calls.listed(text) != wrong
    if form.names[0] == "llama3_json":
        return
    answer = {
        "properties": {"a": {"$ref": "#/$defs/x"}},
        "required": ["a"],
        "$defs": {"x": {"const": 5}},
    }
    either = GuidedCalls(AnswerReading(None, form, tools, 1), {**EMPTY, **answer})
    plain = drawn(reader, GuidedCalls(AnswerReading(None, form, {"stop": EMPTY}, 1)), "")[0]
    for wish in ('{"a":5}', plain):
        got, rule, ids = drawn(reader, either, wish)
        assert got == wish and rule.problem(ids) is None
        found = json.loads(either.listed(got))
        assert found == ({"a": 5} if wish != plain else [{"name": "stop", "arguments": {}}])


def test_references_in_parameters_lead_to_their_own():
    inner = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"type": "integer"}}}
    form = format_of("calls", "", "json")
    calls = GuidedCalls(AnswerReading(None, form, {"f": inner, "g": inner}))
    forms = calls["items"]["anyOf"]
    for i, one in enumerate(forms):
        place = one["properties"]["arguments"]["properties"]["a"]["$ref"]
        assert place == f"#/items/anyOf/{i}/properties/arguments/$defs/x"


def test_unknown_names_of_formats_are_one_line(readers):
    for option in ("tool_call_parser", "reasoning_parser"):
        with pytest.raises(ConfigError, match=rf"{option}=x: must be one of none, .*; choose one"):
            readers("hermes", **{option: "x"})


@pytest.fixture(scope="module")
def caller(tmp_path_factory):
    """OpenAI's client of a server whose template writes calls."""
    folder = hub_folder(
        tmp_path_factory.mktemp("tools") / "hub",
        options={"chat_template": TEMPLATES["hermes"]},
        max_position_embeddings=1024,
    )
    with (
        served(folder, "--reasoning-parser", "none", "--model-name", "m") as server,
        openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as one,
    ):
        yield one


def test_the_round_trip_of_openais_client(caller):
    asked = {"model": "m", "tools": TOOLS, "temperature": 0, "max_tokens": 400}
    for choice in (NAMED, "required"):
        found = caller.chat.completions.create(messages=[USER], tool_choice=choice, parallel_tool_calls=False, **asked)
        (one,) = found.choices
        assert one.finish_reason == "tool_calls" and one.message.content is None
        (call,) = one.message.tool_calls
        assert call.function.name in ("weather", "stop")
        city = json.loads(call.function.arguments).get("city")
        assert (city in ("Bern", "Oslo")) is (call.function.name == "weather")
        with caller.chat.completions.stream(
            messages=[USER], tool_choice=choice, parallel_tool_calls=False, **asked
        ) as stream:
            last = stream.get_final_completion().choices[0]
        assert last.message.tool_calls[0].function.arguments == call.function.arguments
        assert last.finish_reason == "tool_calls"
        talk = [USER, one.message, {"role": "tool", "tool_call_id": call.id, "content": "dry"}]
        for more in ({}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
            again = caller.chat.completions.create(messages=talk, **asked | more | {"max_tokens": 3})
            assert again.choices[0].finish_reason == "length"
            assert isinstance(again.choices[0].message.content, str)


def test_one_body_for_models_with_and_without_efforts(caller):
    raw = caller.chat.completions.with_raw_response.create(
        model="m", messages=[USER], max_tokens=1, reasoning_effort="low", verbosity="low"
    )
    assert raw.headers["x-without-effect"] == "reasoning_effort, verbosity"
    with caller.chat.completions.with_streaming_response.create(
        model="m", messages=[USER], max_tokens=1, reasoning_effort="low", stream=True
    ) as raw:
        assert raw.headers["x-without-effect"] == "reasoning_effort"
    raw = caller.chat.completions.with_raw_response.create(model="m", messages=[USER], max_tokens=1)
    assert "x-without-effect" not in raw.headers


def test_calls_that_must_be_on_a_model_without_tools(client):
    found = client.chat.completions.create(
        model="tiny", messages=[USER], tools=TOOLS, tool_choice=NAMED, max_tokens=80, n=2, seed=1
    )
    for one in found.choices:
        (call,) = one.message.tool_calls
        assert json.loads(call.function.arguments)["city"] in ("Bern", "Oslo")
    with pytest.raises(openai.BadRequestError, match="template does not write them"):
        client.chat.completions.create(model="tiny", messages=[USER], tools=TOOLS)
