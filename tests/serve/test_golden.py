"""Whole transcripts, byte for byte but for ids, times and numbers of the model: what a client may rely on in the
protocol.

`python -m tests.serve.test_golden` writes them anew, after a change that is meant.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.support.serving import make_run, served

GOLDEN = Path(__file__).with_name("golden.txt")
CALLS = {
    "models": ("/v1/models", None),
    "completion": ("/v1/completions", {"prompt": "def", "max_tokens": 2, "seed": 1, "n": 2}),
    "completion with logprobs and echo": (
        "/v1/completions",
        {"prompt": "def", "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True},
    ),
    "completion as a stream": (
        "/v1/completions",
        {"prompt": "def", "max_tokens": 2, "seed": 1, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "conversation": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "def"}], "max_tokens": 1, "seed": 1, "logprobs": True, "top_logprobs": 1},  # noqa: E501
    ),
    "conversation as a stream": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "def"}], "max_tokens": 2, "seed": 1, "stream": True},
    ),
    "tokens": ("/tokenize", {"prompt": "def main("}),
    "text of tokens": ("/detokenize", {"tokens": [5, 6]}),
    "an error": ("/v1/completions", {"prompt": "def", "n": 0}),
    "a model that is not there": ("/v1/completions", {"prompt": "def", "model": "gpt-5"}),
    "a field that is refused": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}),  # noqa: E501
    "health": ("/health", None),
}  # fmt: skip


def curl(server, path, body):
    """What curl shows: status, headers and body, with what differs between runs and machines masked."""
    command = ["curl", "-sS", "-i", "-m", "60", f"{server.address}{path}"]
    if body is not None:
        command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
    said = subprocess.run(command, capture_output=True, check=True).stdout.decode()
    said = said.replace("\r", "")
    for pattern, mask in (
        (r"^date: .*\n", ""),
        (r"^content-length: .*\n", ""),
        (r"^x-request-id: [0-9a-f]{32}$", "x-request-id: ID"),
        (r'"(chat)?cmpl-[0-9a-f]{32}"', r'"\1cmpl-ID"'),
        (r'"created":\d+', '"created":0'),
        (
            r'"(text|content|token)":"(?:[^"\\]|\\.)*"',
            r'"\1":"..."',
        ),  # rounding may choose another token
        (r'"delta":\{("content":"...")?\}', '"delta":{...}'),
        (r"(?<!HTTP/)\b-?\d+\.\d+(e-?\d+)?", "0.5"),
        (r'"(completion|total)_tokens":\d+', r'"\1_tokens":0'),
        (r'^data: (?!.*"role").*"finish_reason":null.*\n\n', ""),  # as many as the clock says
        (r'"tokens":\["[^]]*\]', '"tokens":[...]'),
        (r'"bytes":\[[^]]*\]', '"bytes":[...]'),
        (r'"text_offset":\[[^]]*\]', '"text_offset":[...]'),
        (r'"top_logprobs":\[null.*?\}\]', '"top_logprobs":[...]'),
        (r'"finish_reason":"(stop|length)"', '"finish_reason":"END"'),
    ):
        said = re.sub(pattern, mask, said, flags=re.MULTILINE)
    return said


def transcript(server):
    """All calls, one after the other."""
    parts = [f"### {name}\n{curl(server, *call)}" for name, call in CALLS.items()]
    return "\n".join(part.rstrip() + "\n" for part in parts)


@pytest.mark.parametrize("name", CALLS)
def test_transcripts_are_the_golden_ones(server, name):
    golden = GOLDEN.read_text().split("### ")[1:]
    known = dict(part.split("\n", 1) for part in golden)
    assert curl(server, *CALLS[name]).rstrip() == known[name].rstrip()


if __name__ == "__main__":
    with (
        tempfile.TemporaryDirectory() as place,
        served(make_run(Path(place) / "tiny"), is_forked=False) as one,
    ):
        GOLDEN.write_text(transcript(one))
        sys.stdout.write(GOLDEN.read_text())
