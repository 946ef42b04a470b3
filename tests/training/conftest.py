"""A tiny corpus and a tiny run for the tests of the trainer."""

import functools
import math
import random
import signal

import pytest
from rich.console import Console

from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.training import loop
from expertmesh.training.loop import train

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "def",
    "return",
    "import",
    "self",
    "value",
    "=",
    "(",
    ")",
    ":",
    "1",
    "2",
    "3",
    "\n",
]


def write_corpus(folder, *, documents=40, words=400, seed=0):
    """Text files of random words; returns the folder."""
    generator = random.Random(seed)
    folder.mkdir(parents=True)
    for i in range(documents):
        text = " ".join(generator.choice(WORDS) for _ in range(words))
        (folder / f"file{i:03d}.txt").write_text(f"document {i}\n{text}\n")
    return folder


@pytest.fixture
def terminal():
    """A SIGHUP ends this process, as it does in a terminal; under nohup it is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session")
def make_corpus():
    return write_corpus


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def tiny_in(corpus_folder, cache_folder):
    """A function that makes the configuration of a tiny run in a folder, with changes by dotted name."""

    def make(folder, **changes):
        values = {
            "model.vocab_size": 300,
            "model.dim": 32,
            "model.moe.hidden_dim": 16,
            "model.ffn_hidden_dim": 32,
            "model.max_seq_len": 16,
            "data.path": str(corpus_folder),
            "data.cache_dir": str(cache_folder),
            "data.max_bytes": None,
            "data.seq_len": 16,
            "train.steps": 8,
            "train.batch_size": 4,
            "train.eval_every": 4,
            "train.eval_batches": 1,
            "train.checkpoint_every": 4,
            "train.dtype": "float32",
            "train.device": "cpu",
            "train.tensorboard": False,
            "train.run_dir": str(folder / "run"),
            "optim.warmup_steps": 2,
        }
        return RECIPES["gpt-moe-test"]().updated(values | changes)

    return make


@pytest.fixture
def tiny(tiny_in, tmp_path):
    """The same in the test's own folder."""
    return functools.partial(tiny_in, tmp_path)


@pytest.fixture(scope="session")
def run_quietly():
    """Train without output."""

    def run(config):
        return train(config, recipe="gpt-moe-test", console=Console(quiet=True))

    return run


def spoil_gradients(is_bad):
    """For `before_steps`: gradients of the steps whose numbers are bad are not finite."""
    seen = []

    def action(model, step):
        seen.append(step)
        if len(seen) == 1:
            norm = model.final_norm.weight
            norm.register_hook(lambda g: g * (math.nan if is_bad(seen[-1]) else 1))

    return action


@pytest.fixture
def before_steps(monkeypatch):
    """A function that has another one, of the model and the step's number, called before every training step."""

    def install(action):
        training_step = loop.training_step

        def step(task, model, *args, **kwargs):
            action(model, kwargs["step"])
            return training_step(task, model, *args, **kwargs)

        monkeypatch.setattr(loop, "training_step", step)

    return install
