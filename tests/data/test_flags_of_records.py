"""Flags and judgements of whole records: none is learned in silence, whatever the file and the shape."""

import json

import pytest
from tests.data.test_records import FILES, NUMBERS, in_lines, talk

from expertmesh.config.text import TextConfig
from expertmesh.data.conversation_lines import ALL_FLAGS, checked
from expertmesh.data.corpus import load_corpus
from expertmesh.errors import ConfigError

KINDS = [FILES[0], FILES[-1], FILES[6]]
"""JSON lines, Parquet and a table with commas."""
OFF = {name: name == "masked" for name in ALL_FLAGS}
SHAPES = {
    "messages": lambda i: {"messages": talk(f"q{i}", f"a{i}")},
    "prompt": lambda i: {"prompt": f"q{i}", "completion": f"a{i}"},
    "text": lambda i: {"text": f"t{i}"},
}
EXCLUDED = "says of the whole line that it is not learned; correct"
JUDGED = "which is not read: preferences are not learned; keep what is right"


def loaded(path, write, records, **options):
    path.write_bytes(write(records))
    return load_corpus(TextConfig(path=str(path), validation_fraction=0.4, **options))


def with_field(shape, name, value, last):
    """Records with a field that has another value in the last one."""
    values = [value] * (len(NUMBERS) - 1) + [last]
    return [{**SHAPES[shape](i), name: values[i]} for i in NUMBERS]


@pytest.mark.parametrize(("file", "write"), KINDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ALL_FLAGS)
def test_a_record_that_is_not_to_be_learned_is_refused(tmp_path, name, shape, file, write):
    on, off = not OFF[name], OFF[name]
    for values in ((on, off), (int(on), int(off))):
        with pytest.raises(ConfigError, match=rf"{file}, \w+ \d+: {EXCLUDED}"):
            loaded(tmp_path / file, write, with_field(shape, name, *values))
    corpus = loaded(tmp_path / file, write, with_field(shape, name, on, on))
    assert len(corpus.training) + len(corpus.validation) == len(NUMBERS)


@pytest.mark.parametrize(("file", "write"), KINDS)
@pytest.mark.parametrize("shape", ["messages", "text"])
def test_a_flag_is_0_or_1(tmp_path, shape, file, write):
    with pytest.raises(ConfigError, match="has 'weight' .*0.5.*, which is neither 0 nor 1"):
        loaded(tmp_path / file, write, with_field(shape, "weight", 0.5, 0.5))


JUDGEMENTS = [
    ("prompt", "label", True),
    ("prompt", "label", False),
    ("messages", "label", False),
    ("messages", "kto_tag", True),
    ("messages", "kto_tag", False),
    ("messages", "kto_tag", 0),
    ("prompt", "chosen", False),
]


@pytest.mark.parametrize(("file", "write"), KINDS)
@pytest.mark.parametrize(("shape", "name", "value"), JUDGEMENTS)
def test_unpaired_preferences_are_refused(tmp_path, shape, name, value, file, write):
    with pytest.raises(ConfigError, match=rf"the line has '{name}', {JUDGED}"):
        loaded(tmp_path / file, write, with_field(shape, name, value, value))


@pytest.mark.parametrize(("file", "write"), KINDS)
def test_a_label_that_judges_no_answer_is_passed_over(tmp_path, file, write):
    """A class of a text, or the id of a conversation."""
    for shape, value in (("text", False), ("prompt", 1), ("messages", "seven")):
        corpus = loaded(tmp_path / file, write, with_field(shape, "label", value, value))
        assert len(corpus.training) + len(corpus.validation) == len(NUMBERS)


def test_blank_cells_and_a_column_with_the_name_of_a_flag(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text,weight,train\n" + "".join(f"t{i},,\n" for i in NUMBERS))
    assert load_corpus(TextConfig(path=str(path), validation_fraction=0.4)).num_skipped == 0
    corpus = loaded(tmp_path / "a.jsonl", in_lines, [{"loss": str(i)} for i in NUMBERS], column="loss")
    assert {one.read() for one in corpus.training} <= {str(i) for i in NUMBERS}


@pytest.mark.parametrize("name", ["loss_scale", "train_on_turn"])
def test_further_names_of_the_flag_of_an_answer(name):
    found = checked(json.dumps({"messages": [talk("q", "a")[0], talk("q", "a")[1] | {name: 0}]}).encode())
    assert found["messages"][1] == {"role": "assistant", "content": "a", "masked": True}
