"""Pairs of answers: the forms of TRL, LLaMA-Factory and ms-swift give the same rows; mistakes are one line by file and
line."""

import json

import pytest
import torch
from tests.support.byte_tokenizer import byte_tokenizer

from expertmesh.config.text import TextConfig
from expertmesh.data.corpus import load_corpus
from expertmesh.data.pair_data import PairData
from expertmesh.data.text import text_data
from expertmesh.errors import ConfigError
from expertmesh.models.task import named_tensors

NUMBERS = range(20)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def said(who, text):
    return {"from": who, "value": text}


FORMS = {
    "standard": lambda q, c, r: {"prompt": q, "chosen": c, "rejected": r},
    "conversational": lambda q, c, r: {
        "prompt": [user(q)],
        "chosen": [assistant(c)],
        "rejected": [assistant(r)],
    },
    "implicit conversational": lambda q, c, r: {
        "chosen": [user(q), assistant(c)],
        "rejected": [user(q), assistant(r)],
        "score_chosen": 1.0,
    },
    "both": lambda q, c, r: {
        "prompt": q,
        "chosen": [user(q), assistant(c)],
        "rejected": [user(q), assistant(r)],
    },
    "LLaMA-Factory": lambda q, c, r: {
        "conversations": [said("human", q)],
        "chosen": said("gpt", c),
        "rejected": said("gpt", r),
    },
    "LLaMA-Factory's instructions": lambda q, c, r: {
        "instruction": q,
        "input": "",
        "chosen": c,
        "rejected": r,
    },
    "ms-swift": lambda q, c, r: {"messages": [user(q), assistant(c)], "rejected_response": r},
    "ms-swift's messages": lambda q, c, r: {
        "messages": [user(q), assistant(c)],
        "rejected_messages": [user(q), assistant(r)],
    },
}


def data_of(tmp_path, records, *, objective="dpo", name="pairs.jsonl", **options):
    path = tmp_path / name
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    tokenizer = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(tokenizer))
    usual = {"seq_len": 64, "encode_with": str(tokenizer), "cache_dir": str(tmp_path / "cache")}
    config = TextConfig(path=str(path), **usual | options)
    return text_data(config, vocab_size=300, seed=0, objective=objective)


def rows_of(data):
    """Ids and learned tokens of all pairs, in the order of their texts."""
    ids, _, more = data.samples("training", range(data.num_training))
    found = zip(ids.tolist(), more["counts"].tolist(), strict=True)
    return sorted(found)


@pytest.mark.parametrize("form", FORMS)
def test_forms_give_the_same_rows(form, tmp_path):
    texts = [(f"q{i}", f"good {i}", f"bad {i} or so") for i in NUMBERS]
    found, expected = (data_of(tmp_path, [FORMS[one](*text) for text in texts]) for one in (form, "standard"))
    assert isinstance(found, PairData) and found.num_training + found.num_validation == 20
    both = [rows + other for rows, other in ((rows_of(one), [found.num_training]) for one in (found, expected))]
    assert both[0] == both[1]


def test_a_sample_is_a_pair_with_one_prompt(tmp_path):
    data = data_of(tmp_path, [FORMS["standard"](f"q{i}", f"good {i}", "no") for i in NUMBERS])
    ids, targets, more = data.batch(0, 3)
    assert ids.shape == targets.shape == more["counts"].shape == (3, 2, 64)
    assert data.batch(1, 2)[0].equal(ids[1:]) and more["place"].shape == (3, 1)
    tokenizer = byte_tokenizer()
    for pair, learned in zip(targets, more["counts"], strict=True):
        texts = [tokenizer.decode(row[mask].tolist()) for row, mask in zip(pair, learned, strict=True)]
        assert texts[0].startswith("good") and texts[1].startswith("no")
    first = (~more["counts"]).cumprod(2).sum(2)
    assert first[:, 0].equal(first[:, 1]), "answers begin at the same place"


def test_the_prompts_answers_are_not_learned(tmp_path):
    turns = [user("a"), assistant("earlier"), user("b")]
    records = [
        {
            "prompt": [*turns, user(f"{i}")],
            "chosen": [assistant("yes")],
            "rejected": [assistant("no")],
        }
        for i in NUMBERS
    ]
    _, targets, more = data_of(tmp_path, records).batch(0, 1)
    learned = byte_tokenizer().decode(targets[more["counts"]].tolist())
    assert "earlier" not in learned and "yes" in learned and "no" in learned


def test_plain_texts(tmp_path):
    """The common words of both texts are the prompt, cut at a space; no chat template is written."""
    records = [{"chosen": f"say {i} well done", "rejected": f"say {i} wrong"} for i in NUMBERS]
    explicit = [{"prompt": f"say {i}", "chosen": " well done", "rejected": " wrong"} for i in NUMBERS]
    found, expected = (rows_of(data_of(tmp_path, one, completions="text")) for one in (records, explicit))
    assert found == expected
    ids = torch.tensor(found[0][0][0])
    assert "say" in byte_tokenizer().decode(ids[ids > 0].tolist())


def test_equal_prompts_are_on_one_side(tmp_path):
    records = [FORMS["standard"](f"q{i % 5}", f"good {i}", "no") for i in range(60)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in records))
    corpus = load_corpus(TextConfig(path=str(path), validation_fraction=0.3))
    sides = [
        {json.loads(document.read())["messages"][0]["content"] for document in side}
        for side in (corpus.training, corpus.validation)
    ]
    assert sides[0].isdisjoint(sides[1]) and len(sides[0] | sides[1]) == 5


LONG = "x" * 200
LEFT_OUT = {
    "equal": (FORMS["standard"]("q", "same", "same"), "have the same chosen and rejected answer"),
    "equal when cut": (
        FORMS["standard"]("q", f"{LONG}a", f"{LONG}b"),
        "have the same chosen and rejected answer, or the same in their first tokens",
    ),
    "empty": (FORMS["standard"]("q", "good", " "), "have no turn of the assistant that says"),
    "no room": (FORMS["standard"](LONG, "good", "bad"), "in their first tokens"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_pairs_that_teach_nothing_are_counted(case, tmp_path, caplog):
    record, words = LEFT_OUT[case]
    others = [FORMS["standard"](f"q{i}", f"good {i}", "no") for i in NUMBERS]
    data = data_of(tmp_path, [*others, record])
    assert data.num_training + data.num_validation == len(others)
    told = json.loads(next((tmp_path / "cache").rglob("index.json")).read_text())["notes"]
    assert any(words in note and "1 pair" in note and "\n" not in note for note in told), told
    with pytest.raises(ConfigError) as error:
        data_of(tmp_path, [{**record, "n": i} for i in range(2)], name="b.jsonl")
    assert "\n" not in str(error.value)


USUAL = FORMS["standard"]("q", "good", "bad")
MISTAKES = {
    "different prompts": (
        {"chosen": [user("a"), assistant("x")], "rejected": [user("b"), assistant("y")]},
        "line 2: has different prompts in 'chosen' and 'rejected': they differ in message 1",
    ),
    "different systems": (
        {
            "prompt": "q",
            "chosen": [{"role": "system", "content": "s"}, user("q"), assistant("x")],
            "rejected": [user("q"), assistant("y")],
        },
        "line 2: has different prompts",
    ),
    "no answer": (
        {"prompt": "q", "chosen": "x", "rejected": []},
        "line 2: has no turn of the assistant at the beginning of 'rejected'",
    ),
    "nothing in common": (
        {"chosen": "one text", "rejected": "other text"},
        "line 2: has no prompt",
    ),
    "a missing side": ({"prompt": "q", "chosen": "x"}, "line 2: has no 'rejected', as others"),
    "judged": ({**USUAL, "label": True}, "line 2: the line has 'label'"),
    "no text": (
        {**USUAL, "rejected": [{"role": "assistant", "content": 3}]},
        "line 2: message 2 has no text",
    ),
    "the user's words": (
        {"messages": [user("q")], "rejected_response": "x"},
        "line 2: has 'messages' that do not end with the assistant's chosen answer",
    ),
    "pictures": ({**USUAL, "images": ["a.png"]}, "line 2: the line has 'images'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_by_file_and_line(mistake, tmp_path):
    wrong, words = MISTAKES[mistake]
    first = {name: USUAL.get(name) or wrong[name] for name in USUAL if name in wrong}
    if "messages" in wrong:
        first = FORMS["ms-swift"]("q", "x", "y")
    elif mistake == "a missing side":
        first = USUAL
    elif "prompt" not in wrong:
        first = {"chosen": "say a", "rejected": "say b"}
    with pytest.raises(ConfigError) as error:
        data_of(tmp_path, [first, wrong, *[first] * 3])
    said = str(error.value)
    assert "pairs.jsonl" in said and words in said and "\n" not in said


@pytest.mark.parametrize("answers", [("x", "x"), ("y" * 200 + "a", "y" * 200 + "b")], ids=["equal", "cut"])
def test_pairs_that_are_all_equal_are_said_to_be(answers, tmp_path):
    with pytest.raises(ConfigError) as error:
        data_of(tmp_path, [FORMS["standard"](f"q{i}", *answers) for i in NUMBERS])
    said = str(error.value)
    assert "have the same chosen and rejected answer" in said and "\n" not in said


TALKS = [{"messages": [user(f"{i}"), assistant("x")]} for i in NUMBERS]
TEXTS = [{"text": f"text {i}"} for i in NUMBERS]
PAIRS = [FORMS["standard"](f"{i}", "x", "y") for i in NUMBERS]
OBJECTIVES = {
    "none for pairs": (PAIRS, "auto", "give objective.name=dpo, to learn the right answers alone"),
    "answers of pairs": (PAIRS, "sft", "objective.name=sft: learns from a conversation each"),
    "text of pairs": (PAIRS, "lm", "objective.name=lm: learns from a text each"),
    "pairs of talks": (TALKS, "dpo", "use objective.name=sft, or other data"),
    "pairs of texts": (TEXTS, "dpo", "use objective.name=lm, or other data"),
    "talks of texts": (TEXTS, "sft", "use objective.name=lm, or other data"),
}


@pytest.mark.parametrize("case", OBJECTIVES)
def test_objectives_that_do_not_fit_the_data(case, tmp_path):
    records, objective, words = OBJECTIVES[case]
    with pytest.raises(ConfigError) as error:
        data_of(tmp_path, records, objective=objective)
    assert words in str(error.value) and "pairs.jsonl" in str(error.value)


def test_cells_of_answers_are_texts(tmp_path):
    """A table's column `chosen` holds Booleans where it stands alone; beside `rejected` its cells are answers."""
    rows = [(f"q{i}", ("1", "true", "0")[i % 3], ("false", "1", "no")[i % 3]) for i in NUMBERS]
    table = "prompt,chosen,rejected\n" + "".join(f"{','.join(row)}\n" for row in rows)
    (tmp_path / "pairs.csv").write_text(table)
    data = data_of(tmp_path, [FORMS["standard"](*row) for row in rows])
    options = {"seq_len": 64, "encode_with": str(tmp_path / "tokenizer.json")}
    config = TextConfig(path=str(tmp_path / "pairs.csv"), cache_dir=str(tmp_path / "cache"), **options)
    found = text_data(config, vocab_size=300, seed=0, objective="dpo")
    assert found.num_training + found.num_validation == len(rows)
    every = [
        sorted(
            str(one.samples(side, [i])[0].tolist())
            for side in ("training", "validation")
            for i in range(one.num_pairs(side))
        )
        for one in (data, found)
    ]
    assert every[0] == every[1]


def test_pairs_beside_conversations(tmp_path):
    (tmp_path / "data").mkdir()
    for name, records in (("a", PAIRS), ("b", TALKS)):
        text = "".join(f"{json.dumps(one)}\n" for one in records)
        (tmp_path / "data" / f"{name}.jsonl").write_text(text)
    with pytest.raises(ConfigError, match="is a pair of answers and .* a conversation; train on"):
        load_corpus(TextConfig(path=str(tmp_path / "data")))


def test_the_chosen_answers_alone(tmp_path):
    records = [FORMS["implicit conversational"](f"{i}", "yes", "no") for i in NUMBERS]
    data = data_of(tmp_path, records, objective="sft", column="chosen")
    batch = data.batch(0, 4)
    learned = byte_tokenizer().decode(batch[1][named_tensors(batch)["counts"]].tolist())
    assert "yes" in learned and "no" not in learned


def test_packed_rows_have_the_answers_of_the_same_pairs(tmp_path):
    """Chosen and rejected answers of pair k are document k + 1 of their rows, and no pair is lost."""
    records = [FORMS["standard"](f"q{i}", f"good {i * i}", "no " * (i % 5 + 1)) for i in range(40)]
    data, plain = (data_of(tmp_path, records, pack=pack, seq_len=128) for pack in (True, False))
    assert data.num_training < plain.num_training == data.num_pairs("training")
    ids, targets, more = data.samples("training", range(data.num_training))
    one, expected, single = plain.samples("training", range(plain.num_training))
    seen = more["place"][more["place"] >= 0]
    assert sorted(seen.tolist()) == list(range(plain.num_training))
    for row, places in enumerate(more["place"].tolist()):
        for number, place in enumerate((p for p in places if p >= 0), 1):
            for side in range(2):
                at = more["document"][row, side] == number
                own = single["is_token"][place, side]
                assert ids[row, side][at].equal(one[place, side][own])
                assert targets[row, side][at].equal(expected[place, side][own])
                assert more["counts"][row, side][at].equal(single["counts"][place, side][own])
