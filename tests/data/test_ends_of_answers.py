"""What ends an answer is learned whatever the template writes, and generation stops at all of it; flags of messages are
obeyed."""

import json
import logging

import pytest
from tests.support.byte_tokenizer import byte_tokenizer
from tokenizers import AddedToken, Tokenizer

from expertmesh.config.text import TextConfig
from expertmesh.data.conversation_lines import checked
from expertmesh.data.conversations import ConversationData
from expertmesh.data.corpus import load_corpus
from expertmesh.errors import ConfigError
from expertmesh.text.chat import MARKS, OWN_TEMPLATE, OwnFormat, TemplateFormat
from expertmesh.text.format import text_format
from expertmesh.text.stream import TextStream
from expertmesh.text.tokenizer import load_tokenizer, train_tokenizer

SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|end|>", "<|call|>")
ASKS = "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
GLM = (  # nothing behind an answer; a tool's result has another mark
    "{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n{{ m.content }}"
    "{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}</tool_call>{% endif %}{% endfor %}" + ASKS
)
LATE = GLM.replace("{{ m.content }}", "{{ m.content }}\n")  # a line behind every message
BEFORE = (  # a line before every mark
    "{% for m in messages %}{{ '' if loop.first else '\n' }}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n' }}<|assistant|>\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant: "
    "{% endif %}"
)
CLOSED = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + ASKS
BETWEEN = (  # an end behind every turn but the last
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.role != 'assistant' or not loop.last %}<|end|>{% "
    "endif %}{% endfor %}" + ASKS
)
CALLS = CLOSED.replace("<|end|>", "{% if m.tool_calls %}<|call|>{% else %}<|end|>{% endif %}")
STRICT = "{% if messages[0].role != 'system' %}{{ raise_exception('no') }}{% endif %}" + GLM
TALK = [("user", "Hi"), ("assistant", "Yes"), ("user", "So?"), ("assistant", "No")]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer(SPECIAL)


def said(*talk):
    return {"messages": [{"role": role, "content": content} for role, content in talk]}


def learned(tokenizer, samples):
    """Answers of every sequence as text; `Ċ` is a line's end."""
    found = []
    for pieces in samples:
        texts, was = [], False
        for piece in pieces:
            if piece.is_learned:
                text = "".join(tokenizer.id_to_token(i) for i in piece.ids)
                texts = [*texts[:-1], texts[-1] + text] if was else [*texts, text]
            was = piece.is_learned
        found.append(texts)
    return found


@pytest.mark.parametrize(
    ("template", "talk", "expected", "ends"),
    [
        (GLM, TALK, [["Yes<|user|>", "No<|endoftext|>"]], {0, 1, 3}),
        (GLM, TALK[:3], [["Yes<|endoftext|>"]], {0, 1, 3}),
        (LATE, TALK, [["YesĊ<|user|>", "NoĊ<|endoftext|>"]], {0, 1, 3}),
        (BEFORE, TALK, [["YesĊ<|user|>", "No<|endoftext|>"]], {0, 1}),
        (GLM, [*TALK[:2], ("tool", "3"), TALK[3]], [["Yes<|observation|>", "No<|endoftext|>"]], {0, 1, 3}),
        (GLM, [*TALK[:2], TALK[3]], [["Yes<|endoftext|>"], ["No<|endoftext|>"]], {0, 1, 3}),
        (STRICT, [("system", "s"), *TALK], [["Yes<|user|>", "No<|endoftext|>"]], {0, 1, 3}),
        (PLAIN, TALK, [["YesĊ<|endoftext|>"], ["NoĊ<|endoftext|>"]], {0}),
        (CLOSED, TALK, [["Yes<|end|>", "No<|end|>"]], {4}),
        (BETWEEN, TALK, [["Yes<|end|>", "No<|endoftext|>"]], {0, 4}),
        (CALLS, TALK, [["Yes<|end|>", "No<|end|>"]], {4, 5}),
    ],
    ids=["marks", "last", "line behind", "line before", "tool", "same role", "strict", "plain", "closed", "between", "calls"],  # noqa: E501
)  # fmt: skip
def test_every_answer_ends_in_a_token_at_which_generation_stops(tokenizer, template, talk, expected, ends):
    form = TemplateFormat(tokenizer, template, {})
    samples = form.samples(said(*talk))
    assert learned(tokenizer, samples) == expected
    names = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    assert set(form.ends) == {names[SPECIAL[i]] for i in ends}
    last = {names["<" + text.rpartition("<")[2]] for row in expected for text in row}
    assert last <= set(form.ends) <= set(text_format(tokenizer).end_ids) | set(form.ends)
    for pieces in samples:  # what is asked for later is what stood before an answer
        ids = [i for piece in pieces for i in piece.ids]
        first = next(i for i, piece in enumerate(pieces) if piece.is_learned)
        before = [i for piece in pieces[:first] for i in piece.ids]
        messages = said(*talk)["messages"]
        assert before in [form.prompt(messages[:n]) for n in range(1, len(messages))]
        assert ids[: len(before)] == before


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

ADDED = {"__type": "AddedToken", "content": "<|im_end|>", "special": True, "normalized": False}


NAMED = [
    # whether decoding in transformers leaves <|im_start|> out: not where a list names what its file has as plain
    ({"x_token": "<|im_start|>"}, True),
    ({"extra_special_tokens": {"x_token": "<|im_start|>"}}, True),
    ({"extra_special_tokens": ["<|im_start|>"]}, False),
    ({"additional_special_tokens": ["<|im_start|>"]}, False),
]


@pytest.mark.parametrize("end_token", ["<|im_end|>", ADDED])
@pytest.mark.parametrize(("config", "is_left_out"), NAMED)
def test_added_tokens_that_the_configuration_names_are_special_as_in_transformers(
    tmp_path, config, is_left_out, end_token
):
    """`em.add_tokens` and many files add them as plain ones; the end of a text is there besides."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer(("<|endoftext|>",))
    marks = ("<|im_start|>", "<|im_end|>", "<tool>")
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(config | {"eos_token": end_token, "chat_template": CHATML})
    )
    _, end, tool = map(tokenizer.token_to_id, marks)
    ours = load_tokenizer(path)
    form = text_format(ours, path)
    assert end in form.end_ids and form.chat.ends == (end,)
    assert text_format(tokenizer, path).chat.ends == (end,)  # of a tokenizer in memory, too
    assert learned(ours, form.chat.samples(said(*TALK))) == [["Yes<|im_end|>", "No<|im_end|>"]]
    assert form.chat.problem(said(("user", "a<|im_end|>b"), TALK[1])) is not None
    assert form.chat.problem(said(("user", "a<tool>b"), TALK[1])) is None
    assert end not in form.prompt_ids("a<|im_end|>b") and tool in form.prompt_ids("a<tool>b")
    ids = form.chat.samples(said(*TALK))[0]
    ids = [*(i for piece in ids for i in piece.ids), tool]
    stream = TextStream(ours)
    text = "".join(map(stream.feed, ids)) + stream.finish()
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert {*theirs.all_special_tokens} == {"<|im_start|>", "<|im_end|>"}
    assert text == ours.decode(ids, skip_special_tokens=True)
    assert text == "user\nHi\nassistant\nYes\nuser\nSo?\nassistant\nNo\n<tool>"
    said_there = theirs.decode(ids, skip_special_tokens=True)
    assert text == (said_there if is_left_out else said_there.replace("<|im_start|>", ""))


HARMONY = (  # gpt-oss: the last answer returns, earlier ones end, and there is a date without a default
    "<|start|>system<|message|>Current date: {{ strftime_now('%Y-%m-%d') }}<|end|>"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_harmony_returns_and_calls(tokenizer):
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|return|>")
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    form = TemplateFormat(tokenizer, HARMONY, {})
    names = {tokenizer.id_to_token(i) for i in form.ends}
    assert names == {"<|return|>", "<|call|>"}  # <|end|> goes on: another channel follows
    before = "<|channel|>final<|message|>"
    expected = [[f"{before}{text}<|return|>"] for text in ("Yes", "No")]
    assert learned(tokenizer, form.samples(said(*TALK))) == expected
    prompt = tokenizer.decode(form.prompt(said(*TALK[:3])["messages"]), skip_special_tokens=False)
    assert prompt.endswith("Yes<|end|><|start|>user<|message|>So?<|end|><|start|>assistant")
    assert "Current date: 2025-01-01<|end|>" in prompt


@pytest.mark.parametrize("template", [GLM, LATE, CLOSED, BETWEEN, STRICT, PLAIN])
def test_a_header_is_no_answer_where_the_template_ignores_the_wish_for_one(tokenizer, template):
    """The same is learned and asked for as with a template that hears it."""
    start, mark, _ = template.rpartition("{% if add_generation_prompt %}")
    assert mark
    heard, ignored = (TemplateFormat(tokenizer, text, {}) for text in (template, start))
    talk = [("system", "Be"), *TALK]
    assert ignored.samples(said(*talk)) == heard.samples(said(*talk))
    turns = said(*talk[:2])["messages"]
    assert ignored.prompt(turns) == heard.prompt(turns) and ignored.ends == heard.ends
    assert "header" in ignored.identity and "header" not in heard.identity


def test_a_template_without_headers_stays_as_it_is(tokenizer):
    mistral = (
        "{% for m in messages %}{{ '[INST] ' if m.role == 'user' }}{{ m.content }}{{ ' [/INST] ' if m.role == "
        "'user' else '<|end|>' }}{% endfor %}"
    )
    form = TemplateFormat(tokenizer, mistral, {})
    assert learned(tokenizer, form.samples(said(*TALK))) == [["Yes<|end|>", "No<|end|>"]]
    assert "header" not in form.identity


def test_a_call_of_a_tool_ends_where_its_result_begins(tokenizer):
    form = TemplateFormat(tokenizer, GLM, {})
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    talk = said(*TALK[:1], ("tool", "3"), ("assistant", "3!"))
    talk["messages"].insert(1, call)
    (row,) = learned(tokenizer, form.samples(talk))
    assert row == ["<tool_call>f</tool_call><|observation|>", "3!<|endoftext|>"]
    with pytest.raises(ConfigError, match="calls of tools need a chat template that writes them"):
        TemplateFormat(tokenizer, CLOSED, {}).samples(talk)
    with pytest.raises(ConfigError, match="calls of tools need a chat template that writes them"):
        form.samples({**said(*TALK), "tools": [{"name": "f"}]})


def test_only_formats_whose_tokens_are_others_have_another_name(tokenizer):
    """The tokens of a run that goes on are found by it."""
    import hashlib

    for template in (GLM, PLAIN, BETWEEN, CLOSED, CALLS, OWN_TEMPLATE):
        told = json.dumps([template, {}], sort_keys=True)
        old = f"template {hashlib.sha256(told.encode()).hexdigest()}"
        kept = TemplateFormat(tokenizer, template, {}).identity == old
        assert kept is (template in (CLOSED, CALLS, OWN_TEMPLATE))


FLAGGED = [
    ({"weight": 0}, False),
    ({"weight": 1}, True),
    ({"weight": 0.0}, False),
    ({"weight": None}, True),
    ({"train": False}, False),
    ({"train": True}, True),
    ({"training": False}, False),
    ({"loss": False}, False),
    ({"loss": True, "weight": 1}, True),
    ({"loss_mask": 0}, False),
    ({"masked": True}, False),
    ({"masked": False}, True),
    ({}, True),
]


def flagged(flag):
    talk = said(("user", "q"), ("assistant", "BAD"), ("user", "r"), ("assistant", "good"))
    talk["messages"][1] |= flag
    return talk


@pytest.mark.parametrize(("flag", "is_learned"), FLAGGED)
@pytest.mark.parametrize("template", [None, CLOSED, GLM, PLAIN], ids=["own", "closed", "glm", "plain"])
def test_an_answer_is_learned_as_its_flag_says(tokenizer, flag, is_learned, template):
    own = train_tokenizer(["q BAD r good"], vocab_size=300, marks=MARKS)
    form = OwnFormat(own) if template is None else TemplateFormat(tokenizer, template, {})
    which = own if template is None else tokenizer
    talk = checked(json.dumps(flagged(flag)).encode())
    answers = sum(learned(which, form.samples(talk)), [])
    assert [text.rstrip("Ċ").partition("<")[0].rstrip("Ċ") for text in answers] == (
        ["BAD", "good"] if is_learned else ["good"]
    )
    plain = form.samples(checked(json.dumps(flagged({})).encode()))
    if is_learned:
        assert form.samples(talk) == plain
    elif template != PLAIN:  # it is read all the same
        rows = [[[i for piece in row for i in piece.ids] for row in one] for one in (form.samples(talk), plain)]
        assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (1, {"weight": 0.5}, "message 2 has 'weight' 0.5, which is neither 0 nor 1"),
        (1, {"weight": "0"}, "message 2 has 'weight' '0', which is neither"),
        (1, {"train": []}, r"message 2 has 'train' \[\], which is neither"),
        (1, {"loss_mask": [0, 1]}, "message 2 has 'loss_mask'"),
        (1, {"weight": 0, "train": True}, "'weight' and 'train', which contradict"),
        (0, {"train": True}, "message 1 has 'train', and only what the assistant says is learned"),
        (1, {"function_call": {"name": "f"}}, "'function_call', which is not read: write it as 'tool_calls'"),
        (1, {"segments": [{"text": "a", "label": True}]}, "'segments', which is not read"),
        (None, {"weight": 0}, "says of the whole line that it is not learned"),
        (None, {"weight": 2}, "the line has 'weight' 2"),
        (None, {"functions": [{"name": "f"}]}, "the line has 'functions', which is not read: write them as 'tools'"),
        (None, {"system": ["Be brief."]}, "the line has 'system', which is not read: write it as the first"),
        (None, {"chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs', which is not read"),
        (None, {"rejected": "x"}, "preferences are not learned"),
        (None, {"images": ["x"]}, "only text is learned"),
    ],
)  # fmt: skip
def test_flags_without_a_meaning_here_are_refused_by_file_and_line(tmp_path, where, value, words):
    talk = flagged({})
    (talk if where is None else talk["messages"][where]).update(value)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, [flagged({}), talk, flagged({})])))
    with pytest.raises(ConfigError, match=f"a.jsonl, line 2: .*{words}"):
        load_corpus(TextConfig(path=str(path), cache_dir=str(tmp_path)))


def data_of(path, tmp_path, **changes):
    config = TextConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **changes)
    return ConversationData(load_corpus(config), config, vocab_size=300, seed=0)


def test_harmless_values_are_taken_and_the_others_change_the_data(tmp_path):
    """A flag makes other data of a corpus, so that a cache from before it is not used."""
    keys = []
    for value in ({}, {"weight": 1, "images": [], "system": ""}, {"weight": 0}):
        lines = [flagged({}) for _ in range(9)]
        for number, one in enumerate(lines):
            one["messages"][0]["content"] = f"q{number}"
            one["messages"][1] |= {k: v for k, v in value.items() if k == "weight"}
            one |= {k: v for k, v in value.items() if k != "weight"}
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, lines)))
        keys.append(data_of(path, tmp_path, validation_fraction=0.4).key)
    assert keys[0] == keys[1] != keys[2]


def test_what_is_not_learned_or_written_is_counted(tmp_path, caplog):
    lines = [flagged({}) for _ in range(12)]
    for number, one in enumerate(lines):
        one["messages"][0]["content"] = f"q{number}"
    for message in (lines[3]["messages"][1], lines[3]["messages"][3]):
        message["train"] = False
    lines[5]["messages"][1]["reasoning_content"] = "hm"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with caplog.at_level(logging.WARNING):
        data_of(tmp_path / "a.jsonl", tmp_path, validation_fraction=0.4)
    told = "\n".join(caplog.messages)
    assert "1 conversations are left out: they have no turn of the assistant that is to be learned" in told
    assert "1 conversations have thoughts, which the chat format does not write (for example" in told


def test_an_end_that_only_a_text_brings_is_counted(tokenizer, tmp_path, caplog):
    """A template may end an answer by what the answer says, which no example shows."""
    template = CLOSED.replace("<|end|>", "{% if m.content == 'good' %}<|call|>{% else %}<|end|>{% endif %}")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(template)
    lines = [flagged({}) for _ in range(12)]
    for number, one in enumerate(lines):
        one["messages"][0]["content"] = f"q{number}"
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with caplog.at_level(logging.WARNING):
        data_of(tmp_path / "a.jsonl", tmp_path, encode_with=str(tmp_path / "tokenizer.json"))
    assert "12 sequences have an answer that ends in a token at which generation does not stop" in caplog.text
