"""Answers that are JSON of a schema: whatever a random model would rather say, they parse and validate."""

import json
import re
import sys
from functools import reduce

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import Unigram

from expertmesh.engine.engine import Engine
from expertmesh.engine.request import SamplingParams
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.text.tokenizer import train_tokenizer

_NAMES = {"type": "string", "minLength": 1, "maxLength": 5}
SCHEMAS = {
    "enum": {"enum": ["red", 7, None, {"a": [1]}]},
    "record": {
        "type": "object",
        "properties": {"name": _NAMES, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "choice": {"anyOf": [{"const": "a"}, {"type": "array", "items": _NAMES, "maxItems": 2}]},
    "tree": {
        "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
        "$ref": "#/$defs/node",
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}$"},
}
PROMPT = [40, 50, 60]


def engine(tokenizer=None, **options):
    """A random model with a byte-level vocabulary unless one is given, some ids of which have no token."""
    if tokenizer is None:
        tokenizer = train_tokenizer(['{"name": [true, 12]}\n'] * 20, vocab_size=290)
    size = tokenizer.get_vocab_size() + 5
    changes = {"model.vocab_size": size, "model.init_std": 0.3, "model.max_seq_len": 512}
    changes["model.batch_invariant"] = options.get("deterministic", False)
    config = RECIPES["gpt-moe-test"]().updated(changes)
    model = GPT(config.model, dtype=torch.float32, seed=0).eval()
    return Engine(model, tokenizer, **options)


def unigram():
    """A tokenizer as SentencePiece's of the hub: blanks are U+2581, other bytes <0x0A>."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [*' "{}[]:,abcdeglmnrstuf0123456789', "\u2581", '{"', '":', "\u2581true", "\u2581name"]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((word, -1.0) for word in words)]
    made = Tokenizer(Unigram(pieces, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<unk>", "</s>"])
    return made


CASES = {
    "roomy": {},
    "little room": {"num_blocks": 40, "block_size": 8, "token_budget": 24, "max_sequences": 6},
    "guesses": {"num_draft_tokens": 3},
    "deterministic": {"deterministic": True},
    "SentencePiece": {"tokenizer": unigram(), "end_ids": [1]},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_answer_validates_unless_it_is_cut(options):
    made = engine(**options)
    params = [
        SamplingParams(json_schema=schema, n=2, seed=seed, temperature=temperature, max_tokens=150)
        for schema in SCHEMAS.values()
        for seed, temperature in enumerate((0.0, 0.7, 1.0, 1.5))
    ]
    whole = 0
    outputs = made.generate([PROMPT] * len(params), params)
    each = [one for one in params for _ in range(2)]
    for output, one in zip(outputs, each, strict=True):
        assert output.finish_reason in ("stop", "length"), output.error
        if output.finish_reason == "stop":
            jsonschema.validate(json.loads(output.text), one.json_schema)
            whole += 1
        else:
            assert len(output.token_ids) == 150
    assert whole > len(outputs) // 2


def test_batches_and_guesses_change_nothing():
    params = [SamplingParams(json_schema=s, seed=i) for i, s in enumerate(SCHEMAS.values())]
    made = engine(deterministic=True, max_len=120)
    alone = [made.generate([PROMPT], one)[0].token_ids for one in params]
    guessed = engine(deterministic=True, max_len=120, num_draft_tokens=3)
    for other in (made, guessed):
        together = other.generate([PROMPT] * len(params), params)
        assert [one.token_ids for one in together] == alone


def test_those_beside_it_are_as_without_it():
    free = SamplingParams(seed=3, max_tokens=20)
    made = engine(deterministic=True)
    (alone,) = made.generate([PROMPT], free)
    beside = made.generate([PROMPT, PROMPT], [SamplingParams(json_schema={}, max_tokens=20), free])
    assert beside[1].token_ids == alone.token_ids


def test_a_cut_answer_says_length_and_ends_count_in_any_case():
    made = engine()
    text = {"type": "string", "minLength": 50}
    (cut,) = made.generate([PROMPT], SamplingParams(json_schema=text, max_tokens=5, seed=0))
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 5)
    params = SamplingParams(json_schema={"const": 1}, ignore_eos=True, min_tokens=30, max_tokens=40, logprobs=1)
    (short,) = made.generate([PROMPT], params)
    assert (short.finish_reason, short.text) == ("stop", "1")


def test_stop_tokens_of_the_request_do_not_end_an_answer_before_min_tokens():
    made = engine()
    common = {"stop_token_ids": range(made.model.vocab_size), "min_tokens": 9, "max_tokens": 40}
    text = {"type": "string", "minLength": 200}
    for schema, length in ((text, 10), ({"const": 1}, 2)):
        params = SamplingParams(json_schema=schema, seed=0, **common)
        (found,) = made.generate([PROMPT], params)
        assert (found.finish_reason, len(found.token_ids)) == ("stop", length)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "nope"}, "Invalid type"),
        ({"uniqueItems": True, "type": "array"}, "uniqueItems"),
        ({"$ref": "https://example.com/s"}, "not present"),
        ({"type": "string", "pattern": "("}, "regex"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "Unsatisfiable"),
        ({"const": {1, 2}}, "not JSON serializable"),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, "uniqueItems"),
        ({"const": "\ud800"}, "hex escape"),
        ({"properties": {"\udc00": {}}}, "surrogate"),
        (reduce(lambda inner, _: {"items": inner}, range(200), {}), "recursion limit"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_one_line(schema, said):
    made = engine()
    with pytest.raises(ConfigError, match=said) as caught:
        made.add(PROMPT, SamplingParams(json_schema=schema))
    assert "\n" not in str(caught.value) and not made.has_work


def test_what_it_needs_is_said(monkeypatch):
    with pytest.raises(ConfigError, match="must be a JSON schema"):
        SamplingParams(json_schema="text")
    bare = Engine(GPT(RECIPES["gpt-moe-test"]().model, seed=0).eval(), num_blocks=8)
    with pytest.raises(ConfigError, match="no tokenizer"):
        bare.add(PROMPT, SamplingParams(json_schema={}))
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"expertmesh\[json\]"):
        engine().add(PROMPT, SamplingParams(json_schema={}))


GUIDES = {
    "choice": ({"choice": ["yes", " no", "ä\n"]}, r"yes| no|ä\n"),
    "regex": ({"regex": r"\w{1,4}( \d\.?){0,3}|.."}, r"[0-9A-Za-z_]{1,4}( [0-9]\.?){0,3}|.."),
    "grammar": ({"grammar": 'start: "(" start ")" | /[01]+/'}, r"\(*[01]+\)*"),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_answer_matches_unless_it_is_cut(options):
    made = engine(**options)
    expressions = [one for _, one in GUIDES.values()]
    params = [
        SamplingParams(**guide, seed=seed, temperature=seed, max_tokens=40, ignore_eos=True)
        for guide, _ in GUIDES.values()
        for seed in range(4)
    ]
    outputs = made.generate([PROMPT] * len(params), params)
    whole = {one.text: expressions[i // 4] for i, one in enumerate(outputs) if one.finish_reason == "stop"}
    assert {*whole.values()} == {*expressions}
    for text, expression in whole.items():
        assert re.fullmatch(expression, text), text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"choice": []}, "choice=()"),
        ({"choice": ["a"] * 10_001}, "at most 10000 entries"),
        ({"choice": "a"}, "choice=a: must be a list of texts"),
        ({"choice": [""]}, "choice"),
        ({"regex": ""}, "regex=''"),
        ({"regex": "\ud800"}, "regex"),
        ({"regex": "a", "choice": ["a"]}, "regex=a: is given beside choice"),
        ({"json_schema": {}, "grammar": "start: "}, "is given beside json_schema"),
        ({"regex": "(?=a)b"}, "regex: cannot be kept .*looking around"),
        ({"regex": "a" * 2**20}, "characters, more than"),
        ({"regex": "(a?){500}a{500}"}, "too large to follow"),
        ({"grammar": 'start: "a'}, "grammar: cannot be kept"),
        ({"grammar": 'root ::= "a'}, "grammar: cannot be kept"),
    ],
)
def test_a_guide_that_cannot_be_kept_is_one_line(given, said):
    made = engine()
    with pytest.raises(ConfigError, match=said) as caught:
        made.add(PROMPT, SamplingParams(**given))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400 and not made.has_work
