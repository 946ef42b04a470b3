"""A byte-order mark at the beginning of a file is no part of its text, in all small files that are read."""

import codecs

import pytest

from expertmesh.cli.serve import keys_of
from expertmesh.costs.hardware import find_cluster
from expertmesh.planner.own import own_points
from expertmesh.text.format import find_format
from expertmesh.text.tokenizer import train_tokenizer

CLUSTER = 'device = "h100"\nnum_gpus = 16\nranks_per_node = 4\n'
MEASURED = """
[points.mine]
model = "qwen3-30b"
cluster = "h100x8"
measured = 9000
ep = 8
mbs = 2
gbs = 64
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"


def prompt_of(path):
    tokenizer = train_tokenizer(["hello, you there\n"] * 9, vocab_size=270)
    path = path.rename(path.with_name("chat_template.jinja"))
    found = find_format(tokenizer, path.with_name("tokenizer.json"))
    return found.prompt([{"role": "user", "content": "hello"}])


READERS = {
    "keys": (lambda path: keys_of(str(path)), "secret\nother\n"),
    "cluster": (lambda path: find_cluster(str(path)), CLUSTER),
    "measured": (lambda path: own_points(str(path)), MEASURED),
    "template": (prompt_of, TEMPLATE),
}


@pytest.mark.parametrize("name", READERS)
def test_a_mark_changes_nothing(name, tmp_path):
    read, text = READERS[name]
    found = []
    for mark in (b"", codecs.BOM_UTF8):
        path = tmp_path / "file.toml"
        path.write_bytes(mark + text.encode())
        found.append(read(path))
    assert found[0] == found[1]
