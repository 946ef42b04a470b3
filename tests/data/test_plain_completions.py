"""Completions of plain prompts: rows without a chat template, and records that are none."""

import json

import pytest

from expertmesh.config.text import TextConfig
from expertmesh.data.text import text_data
from expertmesh.errors import ConfigError
from expertmesh.text.tokenizer import END_OF_TEXT, load_tokenizer


def test_completions_may_be_plain_texts(tmp_path):
    """Start, prompt, completion and end of text, of which the last two are learned; no template."""
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"{n} and", "completion": f" {n}"} for n in range(30)]
    path.write_text("\n".join(map(json.dumps, pairs)))
    options = {"path": str(path), "seq_len": 64, "cache_dir": str(tmp_path), "completions": "text"}
    data = text_data(TextConfig(**options), vocab_size=300, seed=0)
    tokenizer = load_tokenizer(data.files["tokenizer.json"])
    end = tokenizer.token_to_id(END_OF_TEXT)
    wanted = {(one["prompt"], one["completion"]) for one in pairs}
    ids_BS, targets_BS, more = data.batch(0, 10)
    for ids_S, targets_S, counts_S in zip(ids_BS, targets_BS, more["counts"], strict=True):
        first = int(counts_S.int().argmax())
        learned = targets_S[counts_S].tolist()
        assert ids_S[0] == end and learned[-1] == end and end not in learned[:-1]
        texts = tokenizer.decode(ids_S[1 : first + 1].tolist()), tokenizer.decode(learned[:-1])
        assert texts in wanted
    chat = text_data(TextConfig(**{**options, "completions": "chat"}), vocab_size=300, seed=0)
    assert chat.key != data.key


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "has no 'prompt' and 'completion'"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "has 'system' or 'tools'"),
        ({"prompt": [{"role": "user", "content": "a"}], "completion": "b"}, "has a list of messages"),
        ({"text": "a long text"}, "has no 'prompt' and 'completion'"),
    ],
)  # fmt: skip
def test_plain_completions_need_two_texts(line, why, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({**line, "id": n}) for n in range(30)))
    config = TextConfig(path=str(path), seq_len=64, cache_dir=str(tmp_path / "c"), completions="text")
    with pytest.raises(ConfigError, match=f"data.completions=text.*{why}"):
        text_data(config, vocab_size=300, seed=0)
