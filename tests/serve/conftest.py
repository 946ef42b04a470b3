"""One tiny model that chats, in a server process of its own; what clients say to it goes over loopback."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.chat import MARKS
from expertmesh.text.tokenizer import train_tokenizer

TEXTS = ["def main():\n    return 'é'\n", "import os\n", "日本 🎉\n"] * 20


def make_run(place, *, marks=MARKS):
    """A run with drawn weights, whose tokenizer knows bytes and a few words."""
    changes = {"train.dtype": "float32", "model.init_std": 0.3, "model.max_seq_len": 512}
    config = RECIPES["gpt-moe-test"]().updated(changes)
    place.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(TEXTS, vocab_size=config.model.vocab_size, marks=marks)
    tokenizer.save(str(place / "trained.json"))
    files = {"tokenizer.json": place / "trained.json"}
    config = config.updated({"model.vocab_size": tokenizer.get_vocab_size()})
    RunDir(place).write_description(config, recipe="gpt-moe-test", files=files)
    store = CheckpointStore(RunDir(place).checkpoints, keep_last=1)
    state = GPT(config.model, dtype=torch.float32, seed=1).state_dict()
    store.save(5, {f"model.{name}": one for name, one in state.items()}, {}, eval_loss=None)
    store.wait()
    store.close()
    return place


@dataclass
class Served:
    """A server process.

    Attributes:
        process: it.
        address: http://127.0.0.1:PORT.
        port: the port.
    """

    process: subprocess.Popen
    address: str
    port: int


@contextlib.contextmanager
def served(folder, *options, stderr=subprocess.DEVNULL):
    """A server of a folder on a free port of loopback, ended in the end."""
    command = [sys.executable, "-m", "expertmesh", "serve", str(folder), "--port", "0", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
    )
    try:
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        assert found, f"the server said {line!r}"
        yield Served(process, found.group(0), int(found.group(1)))
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        process.stdout.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The model's folder."""
    return make_run(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def server(folder):
    """A server that all tests of the session share."""
    with served(folder) as found:
        yield found


def events(lines):
    """The JSON values of a stream's lines, and whether it ended with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1:] == ["[DONE]"]
