"""Four kin and more of every defect that strangers met, by the runs that they had, got from others, or damaged."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from expertmesh.models.registry import recipe
from tests.support.mistakes import Mistake, Words, plain, reseal, training
from tests.support.place import Place


class Touch:
    """What unpickles by making a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self.path),)


Call = Callable[[Place], list[str]]
RESUME: Call = lambda p: p.train("--train.resume", "auto", "--train.steps", "3")  # noqa: E731
GENERATE: Call = lambda p: p.generate()  # noqa: E731
REPORT: Call = lambda p: ["report", p.path("run")]  # noqa: E731
EXPORT: Call = lambda p: ["export", p.path("run"), "--output", p.path("out")]  # noqa: E731
BEGIN: Call = lambda p: p.train("--train.init-from", p.path("run"), run="new")  # noqa: E731
CONVERT: Call = lambda p: ["convert", "--from", p.path("run"), "--to", p.path("hub")]  # noqa: E731


def command_in_index(call: Call) -> Words:
    """A run whose index would run a command, and whose manifest fits it."""

    def prepare(place: Place) -> list[str]:
        (checkpoint,) = place.with_run().glob("checkpoints/step_*")
        (checkpoint / ".metadata").write_bytes(pickle.dumps(Touch(place.path("owned"))))
        reseal(checkpoint)
        return call(place)

    return prepare


def command_in_tensors(call: Call) -> Words:
    """A run whose file of tensors is a pickle that would run a command."""

    def prepare(place: Place) -> list[str]:
        (checkpoint,) = place.with_run().glob("checkpoints/step_*")
        data = pickle.dumps(Touch(place.path("owned")))
        for file in checkpoint.glob("*.distcp"):
            file.write_bytes(data + b"\0" * (file.stat().st_size - len(data)))
        reseal(checkpoint)
        return call(place)

    return prepare


def run_with(name: str, change: Callable[[bytes], bytes | None], call: Call = GENERATE) -> Words:
    """A run of which one file is changed, or removed."""

    def prepare(place: Place) -> list[str]:
        file = place.with_run() / name
        content = change(file.read_bytes())
        file.unlink() if content is None else file.write_bytes(content)
        return call(place)

    return prepare


def config_with(call: Call = GENERATE, **values: Any) -> Words:
    """A run with other values at the top of its config.json."""

    def change(data: bytes) -> bytes:
        return json.dumps({**json.loads(data), **values}).encode()

    return run_with("config.json", change, call)


def model_with(**values: Any) -> Words:
    """A run whose config.json says another model than its checkpoints hold."""

    def change(data: bytes) -> bytes:
        config = json.loads(data)
        return json.dumps(config | {"model": config["model"] | values}).encode()

    return run_with("config.json", change)


def damaged(call: Call) -> Words:
    """A run whose only checkpoint has a wrong bit."""

    def prepare(place: Place) -> list[str]:
        for path in place.with_run().glob("checkpoints/step_*/*.distcp"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(bytes(data))
        return call(place)

    return prepare


def renamed(name: str, call: Call) -> Words:
    """A run whose only checkpoint has another name, as a user's own copy has."""

    def prepare(place: Place) -> list[str]:
        (checkpoint,) = place.with_run().glob("checkpoints/step_*")
        checkpoint.rename(checkpoint.with_name(name))
        return call(place)

    return prepare


def with_run(call: Call) -> Words:
    def prepare(place: Place) -> list[str]:
        place.with_run()
        return call(place)

    return prepare


NO_COMMAND = ["is unreadable", "choose another"]
TRUST = {
    "a command in the index, to generate": Mistake(command_in_index(GENERATE), NO_COMMAND, code=1),
    "a command in the index, to report": Mistake(
        command_in_index(REPORT), NO_COMMAND, code=1, may_add=("run/report.html",)
    ),
    "a command in the index, to export": Mistake(command_in_index(EXPORT), NO_COMMAND, code=1),
    "a command in the index, to go on": Mistake(command_in_index(RESUME), NO_COMMAND, code=1),
    "a command in the index, to begin with": Mistake(
        command_in_index(BEGIN), NO_COMMAND, code=1, may_add=("new/", "cache/")
    ),
    "a command in the index, to convert": Mistake(command_in_index(CONVERT), NO_COMMAND, code=1),
    "a command in the tensors, to generate": Mistake(command_in_tensors(GENERATE), [".distcp", ";"], code=1),
    "a command in the tensors, to go on": Mistake(command_in_tensors(RESUME), [".distcp", ";"], code=1),
    "a command in the tensors, to export": Mistake(command_in_tensors(EXPORT), [".distcp", ";"], code=1),
    "a module to import as family": Mistake(
        config_with(family="os:system"), ["os:system", "not of this package", "module:name"]
    ),
    "a module to import as family, to report": Mistake(
        config_with(REPORT, family="os:system"),
        ["os:system", "module:name"],
        may_add=("run/report.html",),
    ),
    "a pickle for a tokenizer": Mistake(
        run_with("tokenizer.json", lambda _: pickle.dumps(Touch("owned"))),
        ["tokenizer.json", "not a readable tokenizer", "restore"],
        code=1,
    ),
}

NOTHING_LEARNED = {
    "initial weights beyond numbers": Mistake(
        training("--model.init-std", "1e38"),
        ["changed nothing", "no checkpoint", "lower --optim.lr"],
        code=1,
        may_add=("run/",),
    ),
    "weights beyond half precision": Mistake(
        training("--model.init-std", "1e30", "--train.dtype", "float16"),
        ["changed nothing", "no checkpoint", "lower --optim.lr"],
        code=1,
        may_add=("run/",),
    ),
    "one bad step is too many": Mistake(
        training("--model.init-std", "1e38", "--train.max-bad-steps", "1"),
        ["1 steps in a row", "no checkpoint was saved", "lower --optim.lr"],
        code=1,
        may_add=("run/",),
    ),
    "a rate that throws all weights away": Mistake(
        training("--optim.lr", "1e38", "--optim.warmup-steps", "0", "--train.steps", "3"),
        ["the last 2 of 3 steps", "there is no checkpoint", "lower --optim.lr"],
        code=1,
        may_add=("run/",),
    ),
}

COPIES = {
    f"only {name}, to {verb}": Mistake(
        renamed(name, call),
        ["no checkpoint", "train it first"],
        code=1,
        may_add=("run/report.html",),
    )
    for name, verb, call in (
        ("step_abc", "generate", GENERATE),
        ("step_00000002_mine", "export", EXPORT),
        ("copy of step_00000002", "convert", CONVERT),
    )
} | {
    "only step_abc, to go on": Mistake(
        renamed("step_abc", lambda p: p.train("--train.resume", "required")),
        ["--train.resume required", "no checkpoint", "--train.resume auto"],
    ),
}


def exporting(output: str, *words: str, make: Callable[[Path], object] | None = None) -> Words:
    """An export to a place, which is made before."""

    def prepare(place: Place) -> list[str]:
        place.with_run()
        target = Path(place.path(output))
        if make is not None:
            make(target)
        return ["export", place.path("run"), "--output", str(target), *words]

    return prepare


EXPORTS = {
    "export over a pipe": Mistake(
        exporting("out", "--overwrite", make=os.mkfifo), ["no regular file", "name a new file"]
    ),
    "export over a link to a pipe": Mistake(
        exporting(
            "out",
            "--overwrite",
            make=lambda p: (os.mkfifo(p.with_name("pipe")), p.symlink_to("pipe")),
        ),
        ["no regular file", "name a new file"],
    ),
    "export over a folder": Mistake(exporting("cache", "--overwrite"), ["is a folder", "name a file, for example"]),
    "export over a file": Mistake(exporting("corpus.txt"), ["corpus.txt", "exists already", "--overwrite"]),
    "export into no folder": Mistake(exporting("no/out"), ["no folder", "make it first"]),
    "export below a file": Mistake(exporting("corpus.txt/out"), ["corpus.txt", "no folder", "make it first"]),
    "export to a screen": Mistake(
        with_run(lambda p: ["export", p.path("run"), "--output", "-"]),
        ["no regular file", "name a new file"],
    ),
    "export to nobody's": Mistake(
        with_run(lambda p: ["export", p.path("run"), "--output", "~nosuchuser/x"]),
        ["~nosuchuser/x", "no such user", "whole path"],
    ),
    "export of a file": Mistake(
        lambda p: ["export", p.path("corpus.txt"), "--output", p.path("out")],
        ["corpus.txt", "is no folder", "give a run directory"],
    ),
    "export of two runs": Mistake(
        lambda p: ["export", p.path("run"), "--run", p.path("run"), "--output", p.path("out")],
        ["two runs given", "leave one out"],
    ),
    "export of a checkpoint that lacks a file": Mistake(
        lambda p: (
            next(p.with_run().glob("checkpoints/*/__0_0.distcp")).unlink(),
            ["export", p.path("run/checkpoints/step_00000002"), "--output", p.path("out")],
        )[1],
        ["__0_0.distcp is missing", ";"],
        code=1,
    ),
    "export of damage": Mistake(damaged(EXPORT), ["checkpoints are damaged", "restore"], code=1),
}


def state_with(call: Call, **values: Any) -> Words:
    """A checkpoint with other values in its state.json, and a manifest that fits."""

    def prepare(place: Place) -> list[str]:
        (checkpoint,) = place.with_run().glob("checkpoints/step_*")
        file = checkpoint / "state.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
        reseal(checkpoint)
        return call(place)

    return prepare


LARGER = {"<|endoftext|>": 0} | {str(i): i for i in range(1, 900)}
FILES = {
    "config.json is a list": Mistake(
        run_with("config.json", lambda _: b"[]"), ["config.json is unreadable", "restore"]
    ),
    "config.json is a number": Mistake(
        run_with("config.json", lambda _: b"3"), ["config.json is unreadable", "restore"]
    ),
    "config.json without a model": Mistake(config_with(model=None), ["model", ";"]),
    "config.json of a later version": Mistake(
        config_with(RESUME, future={"x": 1}), ["cannot go on", "future", "unknown option", ";"]
    ),
    "config.json is empty, to go on": Mistake(
        run_with("config.json", lambda _: b"", RESUME), ["config.json is unreadable", "restore"]
    ),
    "config.json nested without end": Mistake(
        run_with("config.json", lambda _: b"[" * 50_000), ["config.json is unreadable", "restore"]
    ),
    "config.json with a list for a family": Mistake(
        config_with(REPORT, family=[]), ["config.json is unreadable", "restore"]
    ),
    "config.json with a number for a section, to report": Mistake(
        config_with(REPORT, train=3), ["train=3", ";"], may_add=("run/report.html",)
    ),
    "config.json with another family": Mistake(
        config_with(RESUME, family="seq2seq"), ["--family gpt", "seq2seq", "use that value"]
    ),
    "tokenizer of another model": Mistake(model_with(vocab_size=300), ["of another run", "restore"], code=1),
    "tokenizer of another model, to report": Mistake(
        run_with(
            "tokenizer.json",
            lambda _: Tokenizer(WordLevel(LARGER, unk_token="<|endoftext|>")).to_str().encode(),
            REPORT,
        ),
        ["tokenizer.json: has the SHA-256", "was trained with", "restore"],
        code=1,
        may_add=("run/report.html",),
    ),
    "tokenizer.json is a list": Mistake(
        run_with("tokenizer.json", lambda _: b"[]"), ["not a readable tokenizer", "restore"], code=1
    ),
    **{
        f"state.json with {value!r} for {name}, to {verb}": Mistake(
            state_with(call, **{name: value}), [says or f"no usable {name}", "choose"], code=1
        )
        for verb, call, name, value, says in (
            ("go on", RESUME, "progress", None, None),
            ("go on", RESUME, "progress", [3], None),
            ("go on", RESUME, "progress", {"step": "two"}, "progress.step is no number"),
            ("go on", RESUME, "config", None, None),
            ("go on", RESUME, "data_key", 3, None),
            ("go on", RESUME, "scaler", None, None),
            ("go on", RESUME, "step", "2", None),
            ("export", EXPORT, "config", [], None),
            ("export", EXPORT, "config", None, None),
            ("export", EXPORT, "step", "2", None),
        )
    },
    "state.json of a later format": Mistake(
        state_with(RESUME, format_version=99),
        ["format version 99", "use the matching version"],
        code=1,
    ),
    "damage, to report": Mistake(
        damaged(REPORT),
        ["checkpoints are damaged", "restore"],
        code=1,
        may_add=("run/report.html",),
    ),
    "damage, to begin with": Mistake(damaged(BEGIN), ["checkpoints are damaged", "restore"], code=1),
    "a run to begin with that is none": Mistake(
        lambda p: p.train("--train.init-from", p.path("none")), ["none", "does not exist", "train"]
    ),
    "a teacher that is none": Mistake(
        lambda p: p.train("--distill.teacher", p.path("none")), ["none", "does not exist", "train"]
    ),
}


def reporting(*words: str) -> Words:
    return with_run(lambda p: ["report", p.path("run"), *words])


def page(name: str) -> Words:
    return with_run(lambda p: ["report", p.path("run"), "--page", p.path(name)])


REPORTS = {
    "no run to report": Mistake(plain("report"), ["no run given", "write one"]),
    "fewer than no samples": Mistake(reporting("--samples", "-1"), ["--samples -1", "at least"]),
    "heat that is no number": Mistake(reporting("--temperature", "nan"), ["--temperature nan", "finite number"]),
    "negative heat": Mistake(reporting("--temperature", "-1"), ["--temperature -1", "at least 0"]),
    "words for tokens": Mistake(reporting("--tokens", "many"), ["--tokens", "many", "whole number"]),
    "a page that is a folder": Mistake(page("cache"), ["cache", "no regular file", "name a file"]),
    "a page in no folder": Mistake(page("no/page.html"), ["no/page.html", "no folder", "make it first"]),
    "a page to nobody's": Mistake(
        reporting("--page", "~nosuchuser/x"), ["~nosuchuser/x", "no such user", "whole path"]
    ),
    "a prompt longer than the model": Mistake(
        reporting("--prompt", "def " * 200),
        ["prompt of", "shorter than", "shorten it"],
        may_add=("run/report.html",),
    ),
    "a seed of words": Mistake(reporting("--seed", "x"), ["--seed", "x", "whole number"]),
    "a seed beyond 64 bits for samples": Mistake(
        reporting("--seed", str(2**65)),
        [str(2**65), "at most 2^63 - 1", "lower it or leave it out"],
        may_add=("run/report.html",),
    ),
}


def generating(*words: str) -> Words:
    return with_run(lambda p: ["generate", "--run", p.path("run"), *words])


def typed(text: str, *words: str) -> Words:
    def prepare(place: Place) -> list[str]:
        place.patch.setattr("sys.stdin", io.StringIO(text))
        return generating(*words)(place)

    return prepare


def prompts(content: bytes) -> Words:
    def prepare(place: Place) -> list[str]:
        Path(place.path("prompts.txt")).write_bytes(content)
        return generating("--input", place.path("prompts.txt"))(place)

    return prepare


TERMINAL = {
    "a prompt that looks like an option": Mistake(generating("-x"), ["no prompt", "-- before one"]),
    "no prompt": Mistake(generating(), ["no prompt", "write it last"]),
    "two kinds of prompts": Mistake(generating("--interactive", "def"), ["exclude one another", "use one of them"]),
    "a file of prompts and a prompt": Mistake(
        generating("--input", "nothing.txt", "x"), ["exclude one another", "use one of them"]
    ),
    "a prompt and an empty one": Mistake(generating("x", ""), ["prompt=''", "empty", "give"]),
    "a run of nobody's": Mistake(
        plain("generate", "--run", "~nosuchuser/x", "def"),
        ["~nosuchuser/x", "no such user", "whole path"],
    ),
    "a device of another maker": Mistake(
        generating("--device", "mps", "def"), ["--device mps", "cpu, cuda", "for example"]
    ),
    "a prompt that is not UTF-8": Mistake(generating(os.fsdecode(b"\xff")), ["not UTF-8", "convert it"]),
    "nothing on the standard input": Mistake(typed("", "-"), ["empty", "give some text"]),
    "a file of prompts that is not there": Mistake(
        generating("--input", "no/prompts"),
        ["--input no/prompts", "No such file", "name a file"],
    ),
    "a file without prompts": Mistake(prompts(b"\n\n"), ["prompts.txt", "no line", "write"]),
    "a file of prompts in no encoding": Mistake(prompts(b"\xff\n"), ["not UTF-8", "convert it"]),
    "a folder of prompts": Mistake(
        with_run(lambda p: ["generate", "--run", p.path("run"), "--input", p.path("cache")]),
        ["--input", "directory", "name a file"],
    ),
    "heat of nothing": Mistake(
        generating("--temperature", "nan", "def"),
        ["--temperature nan", "finite number", "use 0"],
    ),
    "a seed beyond 64 bits for a text": Mistake(
        generating("--seed", str(2**65), "def"),
        [str(2**65), "at most 2^63 - 1", "lower it or leave it out"],
    ),
    "more tokens than 64 bits": Mistake(generating("--max-tokens", "9" * 30, "def"), ["9" * 30, "ask for at most"]),
    "both greedy and hot": Mistake(
        generating("--greedy", "--top-k", "3", "def"),
        ["--top-k 3", "no effect with --greedy", "leave one of them out"],
    ),
    "a text to translate for a model that continues": Mistake(
        with_run(lambda p: ["translate", "--run", p.path("run"), "--to", "de", "a dog"]),
        ["translate", ";"],
    ),
}

PLACES = {
    "a run below a file": Mistake(lambda p: p.train(run="corpus.txt/run"), ["below a file", "choose a folder"]),
    "a run where no folder can be": Mistake(training("--train.run-dir", "/proc/run"), ["/proc/run", ";"], code=1),
    "a cache where no folder can be": Mistake(
        training("--data.cache-dir", "/proc/cache"),
        ["--data.cache-dir /proc/cache", "cannot be made", "choose a folder"],
    ),
    "an export where no file can be": Mistake(
        with_run(lambda p: ["export", p.path("run"), "--output", "/proc/out"]),
        ["/proc", "cannot be written", "choose another"],
    ),
    "a page where no file can be": Mistake(reporting("--page", "/proc/page.html"), ["/proc", "cannot be written", ";"]),
    "a conversion where no folder can be": Mistake(
        with_run(lambda p: ["convert", "--from", p.path("run"), "--to", "/proc/out"]),
        ["/proc", "cannot be made", "choose another"],
    ),
}


def translating(*words: str, lines: dict[str, bytes] | None = None) -> Words:
    """A call of `translate`, with files of these lines, on a run of which only config.json is there."""

    def prepare(place: Place) -> list[str]:
        for name, content in (lines or {}).items():
            Path(place.path(name)).write_bytes(content)
        folder = Path(place.path("translator"))
        folder.mkdir()
        values = {"recipe": "translate-test", **recipe("translate-test").model_dump(mode="json")}
        (folder / "config.json").write_text(json.dumps(values))
        named = [place.path(word[1:]) if word.startswith("@") else word for word in words]
        return ["translate", "--run", str(folder), *named]

    return prepare


TRANSLATE = {
    "no language": Mistake(translating("a dog"), ["--to", "must be given", "--help"]),
    "nothing to translate": Mistake(translating("--to", "de"), ["no text", "give one of the two"]),
    "text twice": Mistake(translating("--to", "de", "--input", "@a", "a dog"), ["--input", "give one of the two"]),
    "no file to translate": Mistake(
        translating("--to", "de", "--input", "@none"), ["--input", "none", "check the path"]
    ),
    "a reference of other lines": Mistake(
        translating("--to", "de", "--reference", "@a", "a dog", lines={"a": b"x\ny\n"}),
        ["--reference", "2 lines for 1 texts", "give the file"],
    ),
    "lines in no encoding": Mistake(translating("--to", "de", "--input", "@a", lines={"a": b"\xff\n"}), ["UTF-8", ";"]),
    "a run that was not trained": Mistake(
        translating("--to", "de", "a dog"), ["no checkpoint", "train it first"], code=1
    ),
    "a run to translate that is not there": Mistake(
        plain("translate", "--run", "no/run", "--to", "de", "a dog"), ["no/run", "does not exist"]
    ),
    "beams of words": Mistake(
        translating("--to", "de", "--beams", "many", "a dog"), ["--beams", "many", "whole number"]
    ),
}

RUNS = {
    "A0 nothing runs": TRUST,
    "A3 nothing learned": NOTHING_LEARNED,
    "A4 no room": PLACES,
    "A6 report": REPORTS,
    "A7 copies": COPIES,
    "A10 export": EXPORTS,
    "A11 files of a run": FILES,
    "A14 terminal": TERMINAL,
    "translate": TRANSLATE,
}
