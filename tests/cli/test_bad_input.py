"""A table of mistakes: each gives one line with the value, the rule and the fix, a non-zero exit code, and overwrites
nothing."""

import errno
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.support.known_rows import known
from tests.support.mistakes import (
    Mistake,
    Words,
    check,
    digest,
    plain,
    training,
    wrong_value,
)
from tests.support.mistakes_of_input import INPUT, text
from tests.support.mistakes_of_models import MODELS
from tests.support.mistakes_of_runs import (
    GENERATE,
    REPORT,
    RESUME,
    RUNS,
    damaged,
    generating,
    model_with,
    run_with,
    with_run,
)
from tests.support.patience import PATIENCE_S
from tests.support.place import TEXT, Place

from expertmesh.cli.main import main

COMMAND_LINE = {
    "no such verb": Mistake(plain("trian", "gpt-moe-test"), ["trian", "did you mean train?"]),
    "no recipe": Mistake(plain("train"), ["no recipe given", "gpt-moe-demo"]),
    "unknown recipe": Mistake(lambda p: p.train(recipe="gpt-moe-tset"), ["gpt-moe-tset", "did you mean gpt-moe-test?"]),
    "unknown option": Mistake(training("--train.stepz", "3"), ["--train.stepz", "did you mean --train.steps?"]),
    "option of another section": Mistake(training("--train.lr", "3"), ["--train.lr", "did you mean --optim.lr?"]),
    "section for an option": Mistake(
        training("--model", "3"), ["--model is a section", "for example --model.vocab-size"]
    ),
    "no value": Mistake(training("--train.seed"), ["--train.seed", "needs a value", "write it after"]),
    "option twice": Mistake(training("--train.seed", "1", "--train.seed", "2"), ["--train.seed", "twice", "once"]),
    "word too many": Mistake(training("again"), ["'again'", "options look like"]),
    "more choices than experts": wrong_value("--model.moe.top-k", "5", "fewest experts of a layer, 4", "lower top_k"),
    "expert list of wrong length": Mistake(
        training("--model.moe.num-experts", "4", "4", "4"),
        ["--model.moe.num-experts 4 4 4", "one per MoE layer (2)", "remove"],
    ),
    "groups that do not divide": wrong_value("--model.moe.num-expert-groups", "3", "must divide", "choose a divisor"),
    "option without effect": Mistake(
        training("--model.moe.router", "hash", "--model.moe.input-jitter", "0.1"),
        ["--model.moe.input-jitter 0.1", "no effect with router=hash", "leave it at 0"],
    ),
    "heads that do not divide": wrong_value("--model.num-heads", "3", "must divide dim, 64", "divisor"),
    "odd head size": wrong_value("--model.head-dim", "7", "even head size", "even number"),
    "vocabulary below the bytes": wrong_value("--model.vocab-size", "100", "at least 257", "raise it"),
    "sequence longer than the model": wrong_value(
        "--data.seq-len", "65", "at most --model.max-seq-len, 64", "lower it"
    ),
    "micro-batch that does not divide": wrong_value(
        "--train.micro-batch-size", "3", "must divide --train.batch-size, 8", "divisor"
    ),
    "warm-up longer than the run": wrong_value(
        "--optim.warmup-steps", "9", "at most the steps of the schedule, 2", "lower it"
    ),
    "two sources of data": wrong_value("--data.dataset", "wiki", "conflicts with", "only one"),
    "validation that has a program of its own": Mistake(
        plain("plan", "--validate", "--goal", "memory"),
        ["--validate: is no option of this verb", "python -m benchmarks.planner in a clone"],
    ),
    "claims that have a program of their own": Mistake(
        plain("plan", "gpt-moe-1b", "--claims"),
        ["--claims: is no option of this verb", "python -m benchmarks.planner --claims"],
    ),
    "two reports of the doctor": Mistake(
        plain("doctor", "--topology", "--cluster", "x.toml"),
        ["--topology: has no effect with --cluster", "leave one of the two out"],
    ),
    "unknown device": wrong_value("--train.device", "tpu", "must be auto, cpu, cuda", "for example"),
}


def without_gpu(place: Place) -> list[str]:
    place.patch.setattr(torch.cuda, "is_available", lambda: False)
    return place.train("--train.device", "cuda")


def empty_folder(place: Place) -> list[str]:
    Path(place.path("empty")).mkdir()
    return place.train("--data.path", place.path("empty"))


def folder_of_binaries(place: Place) -> list[str]:
    folder = Path(place.path("binaries"))
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(bytes(range(256)))
    return place.train("--data.path", str(folder))


def without_datasets(place: Place) -> list[str]:
    import importlib.util

    found = importlib.util.find_spec
    place.patch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "datasets" else found(name, *rest),
    )
    words = place.train("--data.dataset", "wiki")
    at = words.index("--data.path")
    return words[:at] + words[at + 2 :]


def cache_is_a_file(place: Place) -> list[str]:
    Path(place.path("file")).write_text("x")
    return place.train("--data.cache-dir", place.path("file"))


DATA = {
    "missing file": wrong_value("--data.path", "no/such.txt", "does not exist", "give"),
    "binary file": Mistake(text("image.png", b"\x89PNG\0\xff" * 999), ["image.png", "binary", "give text"]),
    "text of another encoding": Mistake(
        text("latin.txt", "é\n".encode("latin-1") * 999),
        ["latin.txt", "not UTF-8", "--data.encoding latin-1"],
    ),
    "empty file": Mistake(text("empty.txt", b""), ["empty.txt", "no text", "give"]),
    "one short line": Mistake(text("short.txt", b"hello\n"), ["short.txt", "cannot be split", "more text"]),
    "too little text": Mistake(
        text("little.txt", b"hello world\n" * 60),
        ["training split", "more text"],
        may_add=("cache/",),
    ),
    "empty folder": Mistake(empty_folder, ["empty", "no files", "give text"]),
    "folder of binaries": Mistake(folder_of_binaries, ["binaries", "2 files are binary", "give text"]),
    "datasets not installed": Mistake(without_datasets, ["--data.dataset wiki", "datasets", "install"]),
    "cache folder is a file": Mistake(cache_is_a_file, ["--data.cache-dir", "is a file", "choose a folder"]),
    "no GPU here": Mistake(without_gpu, ["--train.device cuda", "0 usable GPUs", "use cpu"]),
}


def run_in_use(place: Place) -> list[str]:
    import fcntl

    folder = place.with_run()
    file = place.open_until_the_end.enter_context((folder / "lock").open("a+"))
    fcntl.flock(file, fcntl.LOCK_EX)
    return place.train("--train.resume", "auto")


def run_dir_is_a_file(place: Place) -> list[str]:
    Path(place.path("run")).write_text("x")
    return place.train()


def another_model(*words: str) -> Words:
    return with_run(lambda p: p.train("--train.resume", "auto", *words))


def other_data(place: Place) -> list[str]:
    place.with_run()
    Path(place.path("other.txt")).write_text(TEXT.upper())
    return place.train("--train.resume", "auto", "--train.steps", "3", "--data.path", place.path("other.txt"))


def disk_full(place: Place) -> list[str]:
    from expertmesh.checkpoints import store as checkpoint

    def full(folder, tensors):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))

    place.with_run()
    place.patch.setattr(checkpoint, "write_tensors", full)
    return place.train("--train.resume", "auto", "--train.steps", "3")


def spoil_weights(place: Place) -> None:
    """Every weight a model is built with becomes NaN."""
    from expertmesh.models.gpt.model import GPT

    built = GPT.__init__

    def spoiled(self, *values, **names):
        built(self, *values, **names)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(float("nan"))

    place.patch.setattr(GPT, "__init__", spoiled)


def nan_weights(place: Place) -> list[str]:
    spoil_weights(place)
    return place.train("--train.steps", "9", "--train.max-bad-steps", "2")


RUN_DIRECTORY = {
    "run exists": Mistake(
        with_run(lambda p: p.train()),
        ["--train.run-dir", "already holds a run", "--train.resume auto"],
    ),
    "run in use": Mistake(run_in_use, ["--train.run-dir", "in use by process", "choose another"]),
    "run directory is a file": Mistake(run_dir_is_a_file, ["--train.run-dir", "is a file", "choose a folder"]),
    "nothing to resume": wrong_value("--train.resume", "required", "no checkpoint", "--train.resume auto"),
    "run of another model": Mistake(another_model("--model.dim", "32"), ["--model.dim 32", "has 64", "use that value"]),
    "run of other experts": Mistake(
        another_model("--model.moe.num-experts", "8"),
        ["--model.moe.num-experts", "has [4]", "use that value"],
    ),
    "run of other choices": Mistake(
        another_model("--model.moe.top-k", "1"),
        ["--model.moe.top-k 1", "has 2", "use that value"],
    ),
    "run of shorter sequences": Mistake(
        another_model("--data.seq-len", "8"), ["--data.seq-len 8", "has 64", "use that value"]
    ),
    "run of another split": Mistake(
        another_model("--train.steps", "3", "--data.validation-fraction", "0.3"),
        ["not what the run", "use the same data"],
        may_add=("cache/",),
    ),
    "run of another seed": Mistake(another_model("--train.seed", "5"), ["--train.seed 5", "has 0", "use that value"]),
    "run in another precision": Mistake(
        another_model("--train.dtype", "float64"),
        ["--train.dtype float64", "float32", "use a dtype"],
    ),
    "run on other data": Mistake(
        other_data, ["other.txt", "not what the run", "use the same data"], may_add=("cache/",)
    ),
    "all checkpoints damaged": Mistake(damaged(RESUME), ["checkpoints are damaged", "restore"], code=1),
    "disk full": Mistake(
        disk_full,
        ["No space left on device", "free some space"],
        code=1,
        may_add=("run/tensorboard/",),
        may_continue=("run/metrics.jsonl", "run/experts.jsonl", "run/config.json"),
    ),
    "weights not finite": Mistake(
        nan_weights,
        ["2 steps in a row", "no checkpoint was saved", "lower --optim.lr"],
        code=1,
        may_add=("run/",),
    ),
}


def generate_without_checkpoints(place: Place) -> list[str]:
    shutil.rmtree(place.with_run() / "checkpoints")
    return place.generate()


def generate_from_nan(place: Place) -> list[str]:
    import expertmesh.runs.open as trained

    load = trained.read_into

    def spoiled(source, tensors):
        load(source, tensors)
        for tensor in tensors.values():
            tensor.detach().fill_(float("nan"))

    place.with_run()
    place.patch.setattr(trained, "read_into", spoiled)
    return place.generate()


GENERATION = {
    "no run given": Mistake(plain("generate"), ["no run given", "expertmesh generate --help"]),
    "no such run": Mistake(lambda p: p.generate(run="nothing"), ["nothing", "does not exist", "expertmesh train"]),
    "folder without a run": Mistake(
        lambda p: ["generate", p.path("cache"), "def"],
        ["cache", "no config.json", "give the directory"],
    ),
    "truncated config.json": Mistake(
        run_with("config.json", lambda _: b'{"model": {'), ["config.json", "unreadable", "restore"]
    ),
    "config.json of a model that no memory holds": Mistake(
        run_with("config.json", lambda text: re.sub(rb'"dim": \d+', b'"dim": 1000000000', text)),
        ["has model.dim=1000000000", "was trained with 64", "restore the file"],
        code=1,
    ),
    "binary config.json": Mistake(
        run_with("config.json", lambda _: b"\xff\0\x01"), ["config.json", "unreadable", "restore"]
    ),
    "config.json of another program": Mistake(
        run_with("config.json", lambda _: b'{"recipe": "x", "optimizer": 3}'),
        ["optimizer", "unknown option"],
    ),
    "no tokenizer": Mistake(run_with("tokenizer.json", lambda _: None), ["tokenizer.json", "restore"], code=1),
    "a model of the hub that says too little": Mistake(
        run_with(
            "config.json",
            lambda _: b'{"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}',
        ),
        ["config.json of a mixtral has no vocab_size", "restore it from the hub"],
    ),
    "damaged tokenizer": Mistake(
        run_with("tokenizer.json", lambda _: b"{"),
        ["tokenizer.json", "not a readable tokenizer", "restore"],
        code=1,
    ),
    "no checkpoint": Mistake(generate_without_checkpoints, ["no checkpoint", "train it first"], code=1),
    "damaged checkpoint": Mistake(damaged(GENERATE), ["checkpoints are damaged", "restore"], code=1),
    "checkpoint of a wider model": Mistake(
        model_with(ffn_hidden_dim=128, dim=32),
        ["has model.dim=32", "was trained with 64", "restore the file"],
        code=1,
    ),
    "checkpoint of a deeper model": Mistake(
        model_with(num_layers=3),
        ["has model.num_layers=3", "was trained with 2", "restore"],
        code=1,
    ),
    "weights not finite when generating": Mistake(generate_from_nan, ["not finite"], code=1),
    "empty prompt": Mistake(generating(""), ["prompt=''", "is empty", "give"]),
    "prompt too long": Mistake(generating("def " * 200), ["prompt of", "shorter than", "max_seq_len=64", "shorten"]),
    "no new tokens": Mistake(generating("--max-new-tokens", "0", "def"), ["0", "at least 1", "ask for"]),
    "too many new tokens": Mistake(
        generating("--max-new-tokens", "999", "def"), ["999", "max_seq_len=64", "ask for at most"]
    ),
    "negative temperature": Mistake(generating("--temperature", "-1", "def"), ["-1", "at least 0", "use 0"]),
    "top-p above one": Mistake(generating("--top-p", "2", "def"), ["2", "at most 1", "leave it out"]),
    "top-k zero": Mistake(generating("--top-k", "0", "def"), ["0", "at least 1", "leave it out"]),
    "text for top-k": Mistake(generating("--top-k", "few", "def"), ["--top-k", "few", "whole number"]),
    "unknown option of generate": Mistake(
        generating("--temprature", "1", "def"), ["--temprature", "did you mean --temperature?"]
    ),
}


REPORTS = {
    "report of nothing": Mistake(
        lambda p: ["report", "--run", p.path("nothing")],
        ["nothing", "does not exist", "expertmesh train"],
    ),
    "report of no tokens": Mistake(
        lambda p: ["report", "--run", p.path("x"), "--tokens", "0"],
        ["--tokens 0", "at least 1", "for example 100"],
    ),
    "report of damaged config": Mistake(
        run_with("config.json", lambda _: b"[", REPORT), ["config.json", "unreadable", "restore"]
    ),
    "unknown option of report": Mistake(plain("report", "--rum", "x"), ["--rum", "did you mean --run?"]),
}

SECTIONS = INPUT | RUNS | MODELS
KIN = {name: known(SECTIONS[name]) for name in known(list(SECTIONS))}
MISTAKES = {
    f"{item}: {name}": mistake
    for item, table in {
        "command line": COMMAND_LINE,
        "data": DATA,
        "run directory": RUN_DIRECTORY,
        "generate": GENERATION,
        "report": REPORTS,
        **KIN,
    }.items()
    for name, mistake in table.items()
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake(name, place, capfd):
    mistake = MISTAKES[name]
    words = mistake.words(place)
    capfd.readouterr()
    before = digest(place.folder)
    code = main(words)
    check(mistake, code, capfd.readouterr().err, before, digest(place.folder))


def test_the_table_is_long_enough():
    assert len(MISTAKES) >= 120
    assert all(len(table) >= 4 for table in KIN.values())


def test_mistake_in_a_process_of_its_own(place):
    mistake = MISTAKES["command line: unknown option"]
    words = mistake.words(place)
    before = digest(place.folder)
    done = subprocess.run(
        [sys.executable, "-m", "expertmesh", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    check(mistake, done.returncode, done.stderr, before, digest(place.folder))
