"""Server processes for tests: forked from one that has everything imported, or started as a user starts them."""

import contextlib
import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import expertmesh.serve.server  # noqa: F401  what the forked processes need
from expertmesh.checkpoints.store import CheckpointStore
from expertmesh.cli.main import main
from expertmesh.models.gpt.model import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.runs.run_dir import RunDir
from expertmesh.text.chat import MARKS
from expertmesh.text.tokenizer import train_tokenizer

TEXTS = ["def main():\n    return 'é'\n", "import os\n", "日本 🎉\n"] * 20
PATIENCE_S = 120
_ADDRESS = re.compile(r"http://127\.0\.0\.1:(\d+)")


def make_run(place, *, marks=MARKS, **options):
    """A run with drawn weights, whose tokenizer knows bytes and a few words."""
    changes = {"train.dtype": "float32", "model.init_std": 0.3, "model.max_seq_len": 512}
    config = RECIPES["gpt-moe-test"]().updated(changes | options)
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
        process: of `multiprocessing` or `subprocess`.
        address: http://127.0.0.1:PORT.
        said: file of its standard output, while it runs.
    """

    process: Any
    address: str
    said: Path

    @property
    def port(self) -> int:
        """The port."""
        return int(self.address.rpartition(":")[2])

    def send(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.process.pid, number)

    def exit_code(self) -> int:
        """Its exit code, when it has ended."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.wait(timeout=PATIENCE_S)
        self.process.join(PATIENCE_S)
        code = self.process.exitcode
        assert code is not None, "the server does not end"
        return code

    @property
    def has_ended(self) -> bool:
        """Whether it has."""
        if isinstance(self.process, subprocess.Popen):
            return self.process.poll() is not None
        return self.process.exitcode is not None


@contextlib.contextmanager
def served(folder, *options, log="/dev/null", is_forked=True, prepare=None):
    """A server of a folder on a free port of loopback, or on that of the options, ended in the end.

    Where it is forked, `prepare` is called in its process first.
    """
    port = () if "--port" in options else ("--port", "0")
    words = ["serve", str(folder), *port, *options]
    with tempfile.TemporaryDirectory() as place:
        said = Path(place) / "said"
        if is_forked:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload([__name__])
            process = context.Process(target=_child, args=(words, str(said), str(log), prepare))
            process.start()
        else:
            with said.open("w") as out, Path(log).open("w") as error:
                command = [sys.executable, "-m", "expertmesh", *words]
                process = subprocess.Popen(command, stdout=out, stderr=error)
        found = Served(process, "", said)
        try:
            end = time.monotonic() + PATIENCE_S
            while not (said.exists() and (match := _ADDRESS.search(said.read_text()))):
                assert not found.has_ended and time.monotonic() < end, "the server did not begin"
                time.sleep(0.02)
            found.address = match.group(0)
            yield found
        finally:
            if not found.has_ended:
                found.send(signal.SIGTERM)
                found.send(signal.SIGTERM)
                found.exit_code()


def _child(words, said, log, prepare=None):
    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    for number, path in ((1, said), (2, log)):
        with Path(path).open("w") as file:
            os.dup2(file.fileno(), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    code = main(words)
    with contextlib.suppress(OSError):
        sys.stdout.write(f"objects that collections pass over: {gc.get_freeze_count()}\n")
        sys.stdout.flush()
    os._exit(code)


def events(lines):
    """The JSON values of a stream's lines, and whether it ended with [DONE]."""
    data = [line.removeprefix("data: ") for line in lines if line]
    return [json.loads(one) for one in data if one != "[DONE]"], data[-1:] == ["[DONE]"]
