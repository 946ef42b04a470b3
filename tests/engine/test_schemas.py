"""Schemas whose compiled form allowed more than they do: rewritten or refused before, and checked when an answer
ends."""

import json
import random
import threading
import time

import jsonschema
import pytest
from tests.engine.test_grammar import PROMPT, engine

from expertmesh.engine.grammar import PROBLEMS, CompiledSchema
from expertmesh.engine.grammar_trial import GrammarTrial
from expertmesh.engine.request import SamplingParams
from expertmesh.engine.schema_check import SchemaCheck
from expertmesh.engine.schema_patterns import readable_pattern
from expertmesh.engine.schema_reading import read_schema
from expertmesh.errors import ConfigError
from expertmesh.text.stream import TextStream

FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def made():
    return engine(max_len=256)


def number(**bounds):
    return {"type": "number", **bounds}


def whole(**bounds):
    return {"type": "integer", **bounds}


def text(**rules):
    return {"type": "string", **rules}


def record(schema):
    return {
        "type": "object",
        "properties": {"p": schema},
        "required": ["p"],
        "additionalProperties": False,
    }


OPEN = number(exclusiveMinimum=0, maximum=0.25)
CORNERS = [
    OPEN,
    record(OPEN),
    {"allOf": [number(exclusiveMinimum=0), number(maximum=0.5)]},
    {"anyOf": [OPEN, {"type": "null"}]},
    {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 0.7},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 1e-3, "type": "number"},
    number(minimum=-0.25, exclusiveMaximum=0),
    number(exclusiveMinimum=-0.7, exclusiveMaximum=0),
    number(exclusiveMinimum=0.1, exclusiveMaximum=0.3),
    number(exclusiveMaximum=0.1),
    number(minimum=0.1 + 0.2, maximum=0.7),
    number(minimum=0.12345678901234568, maximum=0.9),
    number(exclusiveMinimum=1, exclusiveMaximum=1.000001),
    number(exclusiveMinimum=0, maximum=1, multipleOf=0.5),
    whole(exclusiveMinimum=0.5, exclusiveMaximum=2.5),
    whole(minimum=-(2**63), maximum=2**63 - 1),
    whole(minimum=2**53 - 5, maximum=2**64 - 1),
    whole(exclusiveMaximum=0, multipleOf=7),
    text(format="date"),
    text(format="date-time"),
    text(format="date", pattern="^20"),
    text(pattern=r"^\W\D\S$"),
    text(pattern=r"^[^\w]{2}$"),
    text(pattern=r"^[^\s]\s[^\d]$"),
    text(pattern="^.{2}$"),
    text(minLength=2, maxLength=3),
    {"enum": [1, True, None, 1.5, -0.0, 2**53, {"a": [1e-9]}]},
    {"type": "object", "minProperties": 1, "additionalProperties": whole(minimum=0), "maxProperties": 2},
    {"type": "object", "patternProperties": {r"^\W$": whole()}, "additionalProperties": {"type": "null"}},
    {"$defs": {"p": {"$anchor": "here", **OPEN}}, "type": "array", "items": {"$ref": "#here"}, "maxItems": 3},
    {"$defs": {"a/b": OPEN}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}, "maxItems": 3},
]  # fmt: skip


def walked(rule, tokens, ends, draw, most=90):
    """Text of a random answer, and why it ended: "stop", "length", or the rule's problem."""
    ids = []
    while len(ids) < most:
        allowed = rule.allowed(ids).nonzero()[0].tolist()
        others = [i for i in allowed if i not in ends]
        if len(others) < len(allowed) and (not others or draw.random() < 0.3):
            return b"".join(tokens[i] for i in ids).decode(), "stop"
        short = [i for i in others if tokens[i] in (b'"', b"}", b"]", b"0", b"-", b".")]
        ids.append(draw.choice(short if short and draw.random() < 0.5 else others))
        if (why := rule.problem(ids)) is not None:
            return b"".join(tokens[i] for i in ids).decode(), why
    return "", "length"


@pytest.mark.parametrize("schema", CORNERS, ids=lambda one: json.dumps(one)[:70])
def test_random_answers_validate_and_none_breaks_off(made, schema):
    compiled = made.answer_rules.compiled("json_schema", schema)
    stream = TextStream(made.tokenizer)
    tokens = [stream.bytes_of(i) for i in range(made.model.vocab_size)]
    num_whole = 0
    for seed in range(40):
        rule = compiled.rule()
        found, why = walked(rule, tokens, rule.end_ids, random.Random(seed))
        assert why in ("stop", "length"), (found, why)
        if why == "stop":
            jsonschema.validate(json.loads(found), schema, format_checker=FORMATS)
            num_whole += 1
    assert num_whole


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (whole(multipleOf=999_979), "multipleOf=999979: must be"),
        (number(multipleOf=0.07), "multipleOf=0.07: is not read exactly"),
        (number(multipleOf=-1), "multipleOf=-1: must be above 0"),
        (whole(maximum=2**53 + 1), "maximum=9007199254740993: bounds go to"),
        (number(maximum=2**63 - 1), "bounds go to"),
        (number(minimum=1e300), "bounds go to"),
        ({"const": 2**53 + 1}, "const=9007199254740993: whole numbers"),
        ({"enum": [{"a": [0.1 + 0.2]}]}, "enum=0.30000000000000004: numbers have"),
        ({"enum": [*range(10_001)]}, "enum: has more than 10000 values"),
        ({"anyOf": [{"enum": [*range(6000)]}, {"enum": [*range(6000)]}]}, "enum: has more"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems: is not kept; use a list"),
        ({"type": "object", "minProperties": 2}, "minProperties=2"),
        ({"prefixItems": [{}], "additionalItems": False}, "prefixItems"),
        (
            {"$schema": "http://json-schema.org/draft-07/schema#", "prefixItems": [{}]},
            "prefixItems",
        ),
        ({"$defs": {"a": {"$id": "http://x/y"}}}, r"\$id"),
        ({"$ref": "#/x/a", "x": {"a": OPEN}}, r"\$ref='#/x/a'"),
        ({"$ref": "#"}, "nothing fits it|cannot be kept any further"),
        (text(format="regex"), "Unknown format: regex"),
        (text(pattern="(?i)a"), "no flags"),
        (text(pattern="^[[:alpha:]]$"), "within"),
        (text(pattern="^[a&&b]$"), "within"),
        (text(pattern=r"\Aa\z"), r"\\A is not kept"),
        (text(pattern="a++"), "another meaning"),
        ({"patternProperties": {"(?i)a": {}}}, "no flags"),
        (text(pattern="^(a?){500}a{500}$"), "too large to follow"),
        ({"description": "x" * 2**20}, "characters, more than"),
    ],
    ids=lambda one: str(one)[:60],
)
def test_what_is_not_kept_exactly_is_refused_by_name_and_at_once(made, schema, said):
    begin = time.monotonic()
    with pytest.raises(ConfigError, match=said) as caught:
        made.add(PROMPT, SamplingParams(json_schema=schema))
    assert "\n" not in str(caught.value) and not made.has_work
    assert time.monotonic() - begin < 4


def test_a_refused_place_is_fine_where_it_is_a_value_or_a_name(made):
    for schema in (
        {"const": {"uniqueItems": True, "multipleOf": 999_979}},
        {"properties": {"pattern": {"type": "string"}, "$id": whole(), "multipleOf": whole()}},
        {"type": "array", "uniqueItems": False},
        {"enum": ["(?i)", "[["]},
        *(text(format=form) for form in ("password", "binary", "byte", "path", "json-string")),
    ):
        assert isinstance(made.answer_rules.compiled("json_schema", schema), CompiledSchema)


WRAPPED = whole(minimum=1, maximum=999_999, allOf=[{"multipleOf": 53_300}, {"multipleOf": 80_581}])
"""The compiler's common multiple is beyond 32 bits and becomes 4; nothing fits the schema."""


@pytest.mark.parametrize("schema", [WRAPPED, record(WRAPPED)], ids=["alone", "in a record"])
def test_an_answer_that_the_compiler_ends_wrongly_is_an_error_and_no_stop(made, schema):
    params = SamplingParams(json_schema=schema, max_tokens=120, n=8, seed=0)
    found = made.generate([PROMPT], params)
    assert {one.finish_reason for one in found} <= {"error", "length"}
    wrong = [one.error for one in found if one.finish_reason == "error"]
    assert wrong and all(one.startswith(PROBLEMS) and "does not validate" in one for one in wrong)


VALUES = ["0", "-0", "1", "1.0", "0.3", "0.25", "1e30", "12345678901234567890", "true", "null", '"a"', '"ab"', '"é"',
          "[]", "[1]", '[1,"a"]', "[1,1,1]", "{}", '{"a":1}', '{"a":"x","b":2}', '{"b":{"a":[1]}}']  # fmt: skip
CHECKED = [
    *CORNERS[:16], *CORNERS[21:],
    {"oneOf": [whole(), number(minimum=1)]}, {"allOf": [{"type": "string"}, {"minLength": 2}]},
    {"const": 1}, {"const": True}, {"enum": [[1], {"a": 1}, "a"]}, number(multipleOf=0.25), number(multipleOf=3),
    {"items": whole()}, {"prefixItems": [whole()], "items": False}, {"minItems": 1, "maxItems": 2},
    {"additionalProperties": whole()}, {"properties": {"a": False}}, {"required": ["a"], "maxProperties": 1},
    {"patternProperties": {"^a": whole()}, "additionalProperties": False},
    {"$defs": {"n": {"properties": {"b": {"$ref": "#/$defs/n"}, "a": {"type": "array"}}}}, "$ref": "#/$defs/n"},
    {"type": ["integer", "string"]}, {}, {"not_a_keyword": 1},
]  # fmt: skip


@pytest.mark.parametrize("schema", CHECKED, ids=lambda one: json.dumps(one)[:70])
def test_the_check_of_answers_agrees_with_jsonschema(schema):
    import re

    found = SchemaCheck(json.dumps(schema), read_schema(schema).anchors, lambda p, t: bool(re.search(p, t)))
    for value in VALUES:
        is_valid = jsonschema.Draft202012Validator(schema).is_valid(json.loads(value))
        assert (found.problem(value) is None) == is_valid, value
    assert found.problem("{") == found.problem("NaN") == "the answer is no JSON"


def test_the_check_takes_no_exponential_time_and_no_digits_are_too_many():
    doubled = {"$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}}
    doubled["$defs"]["a60"] = {"type": "integer"}
    deep = SchemaCheck(json.dumps({**doubled, "$ref": "#/$defs/a0"}), {}, None)
    many = SchemaCheck(json.dumps({"items": {"anyOf": [{"const": i} for i in range(2000)]}}), {}, None)
    digits = SchemaCheck(json.dumps(number(multipleOf=3)), {}, None)
    begin = time.monotonic()
    assert deep.problem("1") is None and deep.problem('"a"')
    assert "too large" in many.problem(json.dumps([1999] * 5000))
    assert digits.problem("3" * 50_000) is None and digits.problem("3" * 50_000 + "1")
    assert digits.problem("3e999999999") is None and digits.problem("1e-999999999")
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a.b", r"a[^\n\r\u2028\u2029]b"),
        ("[.]", "[.]"),
        (r"\.", r"\."),
        (r"\d[\d]", "[0-9][[0-9]]"),
        (r"[^\d]", r"[^\p{N}]"),
        (r"a\/b\-\0", r"a\/b\-\x00"),
        ("(?:a)(?<n>b)", "(?:a)(?<n>b)"),
        (r"\u00e9\x41\p{L}", r"\u00e9\x41\p{L}"),
    ],
)
def test_patterns_are_read_as_all_programs_read_them(given, found):
    assert readable_pattern(given) == found


def test_a_trial_ends_in_time_and_memory_and_the_next_one_is_answered():
    trial = GrammarTrial()
    bomb = json.dumps(whole(multipleOf=9_999_991))
    assert trial.problem("json_schema", '{"type": "integer"}') is None
    begin = time.monotonic()
    assert "takes more than 5 s or 1 GiB" in trial.problem("json_schema", bomb)
    assert time.monotonic() - begin < 30
    assert trial.problem("json_schema", '{"type": "integer"}') is None
    assert "Invalid type" in trial.problem("json_schema", '{"type": "nope"}')
    trial.close()
    with pytest.raises(ConfigError, match="cannot start"):
        GrammarTrial("expertmesh.no_such_module").problem("json_schema", "{}")


class Held:
    """A trial that ends when it may."""

    def __init__(self, order):
        self.is_tried, self.may_end, self.order = threading.Event(), threading.Event(), order

    def problem(self, *_):
        self.is_tried.set()
        assert self.may_end.wait(60)
        self.order.append("tried")


def test_steps_go_on_while_another_thread_s_schema_is_tried():
    """By order of events: the first thread's trial ends only after the second thread's answer has."""
    made = engine(max_len=64)
    made.generate([PROMPT], SamplingParams(max_tokens=2))
    params = SamplingParams(json_schema=whole(maximum=9), max_tokens=9)
    for call in (
        lambda: made.generate([PROMPT], params),
        lambda: list(made.stream(PROMPT, SamplingParams(json_schema=whole(maximum=8)))),
        lambda: made.add(PROMPT, SamplingParams(json_schema=whole(maximum=7))),
    ):
        order = []
        held = made.answer_rules.trial = Held(order)
        first = threading.Thread(target=call)
        first.start()
        assert held.is_tried.wait(60)
        (found,) = made.generate([PROMPT], SamplingParams(max_tokens=3))
        order.append(found.finish_reason)
        held.may_end.set()
        first.join(60)
        assert order[0] == "length" and order[1:] == ["tried"]


def test_an_evicted_schema_travels_with_its_request():
    made = engine(max_len=64)
    ready = made.answer_rules.ready(SamplingParams(json_schema=whole(minimum=0, maximum=9), max_tokens=9))
    made.answer_rules.trial = None  # whoever compiles fails
    made.answer_rules._kept.clear()
    (found,) = made.generate([PROMPT], ready)
    assert found.finish_reason == "length" or 0 <= int(found.text) <= 9
