"""Four kin and more for the verbs of images, translations, tasks and other libraries' checkpoints, and for runs that
begin with others."""

import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.mistakes import Mistake, Words, plain
from tests.support.mistakes_of_runs import CONVERT, state_with, translating, with_run
from tests.support.pictures import stripes, write_folder
from tests.support.place import Place

Make = Callable[[Path], object]


def picture(width: int, height: int) -> bytes:
    """A PNG file that promises so many pixels and has none."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = [(13, head), (0, b"IDAT")]
    chunks = [struct.pack(">I", n) + c + struct.pack(">I", zlib.crc32(c)) for n, c in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def images(make: Make, *words: str) -> Words:
    """Training on a folder that is made so."""

    def prepare(place: Place) -> list[str]:
        folder = Path(place.path("images"))
        make(folder)
        return place.train("--data.path", str(folder), *words, recipe="swin-test")

    return prepare


def classes(spoil: Make) -> Make:
    """A folder for each of two classes, with two pictures that are none, one of which is spoiled."""

    def make(folder: Path) -> None:
        for name in ("a", "b"):
            (folder / name).mkdir(parents=True)
            for number in (1, 2):
                (folder / name / f"{number}.png").write_bytes(picture(16, 16))
        (folder / "a" / "1.png").unlink()
        spoil(folder / "a" / "1.png")

    return make


def digits(spoil: Make) -> Make:
    """A folder of IDX files, of which something is spoiled."""

    def make(folder: Path) -> None:
        write_folder(folder, *stripes(12))
        spoil(folder)

    return make


IMAGES = {
    "no folder of images": Mistake(
        lambda p: p.train("--data.path", p.path("corpus.txt"), recipe="swin-test"),
        ["corpus.txt", "is no folder", "per class"],
    ),
    "a folder without images": Mistake(images(Path.mkdir), ["neither folders of images", "check the path"]),
    "a pipe for an image": Mistake(images(classes(os.mkfifo)), ["1.png", "no regular file", "name an image"]),
    "an image of more pixels than memory": Mistake(
        images(classes(lambda f: f.write_bytes(picture(60_000, 60_000)))),
        ["1.png", "pixels", "make it smaller"],
    ),
    "an image of suspiciously many pixels": Mistake(
        images(classes(lambda f: f.write_bytes(picture(12_000, 12_000)))),
        ["1.png", "pixels", "make it smaller"],
    ),
    "an image that is cut off": Mistake(
        images(classes(lambda f: f.write_bytes(picture(16, 16)))),
        ["no image that can be read", "replace or remove it"],
    ),
    "a link to no image": Mistake(
        images(classes(lambda f: f.symlink_to("gone"))), ["1.png", "No such file", ";"], code=1
    ),
    "names of classes that are not UTF-8": Mistake(
        images(digits(lambda f: (f / "classes.txt").write_bytes(b"caf\xe9\n" * 4))),
        ["classes.txt", "UTF-8", "iconv"],
    ),
    "more classes than the head": Mistake(
        images(digits(lambda f: None), "--model.num-classes", "3"),
        ["--model.num-classes 3", "4 classes", "--model.num-classes 4"],
    ),
    "a window that does not divide": Mistake(
        images(digits(lambda f: None), "--model.window-size", "5"),
        ["--model.window-size 5", "must divide", "divisor"],
    ),
}


def classifying(*words: str, make: Make | None = None) -> Words:
    """A call of `classify`; words that begin with @ are paths, of which the file a.png is there."""

    def prepare(place: Place) -> list[str]:
        Path(place.path("a.png")).write_bytes(picture(16, 16))
        if make is not None:
            make(Path(place.path("")))
        named = [place.path(word[1:]) if word.startswith("@") else word for word in words]
        return ["classify", "--run", place.path("run"), *named]

    return prepare


CLASSIFY = {
    "no image": Mistake(classifying(), ["no image", "--score", "a.png"]),
    "no run to classify with": Mistake(classifying("@a.png"), ["run", "does not exist", "expertmesh train"]),
    "classes by a model of texts": Mistake(
        with_run(classifying("@a.png")), ["family gpt", "classifies no images", "family swin"]
    ),
    "a picture over its image": Mistake(
        classifying("@a.png", "--picture", "@a.png"), ["a.png", "is read", "name another"]
    ),
    "a picture in no folder": Mistake(classifying("@a.png", "--picture", "@no/b.png"), ["no folder", "make it first"]),
    "a picture that is a folder": Mistake(
        classifying("@a.png", "--picture", "@cache"), ["cache", "no regular file", "name a file"]
    ),
    "a picture on a device": Mistake(classifying("@a.png", "--picture", "/dev/null"), ["/dev/null", "no regular file"]),
    "a picture over a pipe": Mistake(
        classifying("@a.png", "--picture", "@pipe", make=lambda f: os.mkfifo(f / "pipe")),
        ["pipe", "no regular file", "name a file"],
    ),
    "no images at a time": Mistake(
        classifying("@a.png", "--batch-size", "-3"),
        ["--batch-size -3", "at least 1", "for example 64"],
    ),
    "no class to show": Mistake(classifying("@a.png", "--top", "0"), ["--top 0", "at least 1", "raise it"]),
}


def said(content: bytes) -> Words:
    """A call of `translate` that reads these bytes from its standard input."""

    def prepare(place: Place) -> list[str]:
        stream = io.TextIOWrapper(io.BytesIO(content), encoding="ascii")
        place.patch.setattr("sys.stdin", stream)
        return translating("--to", "de", "-")(place)

    return prepare


LINES = {"a": b"a dog\n"}
TRANSLATED = {
    "translations over their texts": Mistake(
        translating("--to", "de", "--input", "@a", "--output", "@a", lines=LINES),
        ["--output", "is read", "name another"],
    ),
    "translations over their reference": Mistake(
        translating("--to", "de", "x", "--reference", "@a", "--output", "@a", lines=LINES),
        ["--output", "is read", "name another"],
    ),
    "translations in no folder": Mistake(
        translating("--to", "de", "x", "--output", "@no/out"), ["no folder", "make it first"]
    ),
    "translations to nobody's": Mistake(
        translating("--to", "de", "x", "--output", "~nosuchuser/x"), ["no such user", "whole path"]
    ),
    "translations on a device": Mistake(
        translating("--to", "de", "x", "--output", "/dev/null"), ["no regular file", "name a file"]
    ),
    "a text in no encoding": Mistake(
        translating("--to", "de", os.fsdecode(b"caf\xe9")),
        ["caf\\udce9", "not UTF-8", "convert it"],
    ),
    "texts in no encoding, typed": Mistake(said(b"caf\xe9\n"), ["not UTF-8", "convert it"]),
    "no beam": Mistake(translating("--to", "de", "--beams", "0", "x"), ["--beams 0", "at least 1"]),
    "no texts at a time": Mistake(
        translating("--to", "de", "--batch-size", "0", "x"), ["--batch-size 0", "at least 1"]
    ),
    "a penalty that is no number": Mistake(
        translating("--to", "de", "--length-penalty", "nan", "x"),
        ["--length-penalty nan", "finite number"],
    ),
    "a negative penalty": Mistake(
        translating("--to", "de", "--length-penalty", "-1", "x"),
        ["--length-penalty -1", "at least 0", "for example 1"],
    ),
    "an endless penalty": Mistake(translating("--to", "de", "--length-penalty", "inf", "x"), ["inf", "finite number"]),
    "a folder as reference": Mistake(
        translating("--to", "de", "x", "--reference", "@cache", lines=LINES),
        ["--reference", "is not a file", "check the path"],
    ),
}


def judging(*words: str) -> Words:
    return lambda p: ["evaluate", "--run", p.path("run"), *words]


def without_harness(place: Place) -> list[str]:
    place.patch.setattr("expertmesh.cli.evaluate.find_spec", lambda name: None)
    Path(place.path("a.yaml")).write_text("task: a\ndataset_path: json\n")
    return judging("--tasks", place.path("a.yaml"))(place)


def judging_alone(task: str, *words: str) -> Words:
    """Without lm-evaluation-harness, which is not asked for where something else is wrong."""

    def prepare(place: Place) -> list[str]:
        without_harness(place)
        Path(place.path("a.yaml")).write_text(task)
        return judging("--tasks", place.path("a.yaml"), *words)(place)

    return with_run(prepare)


EVALUATE = {
    "no task": Mistake(judging(), ["--tasks", "must be given", "--help"]),
    "no question": Mistake(judging("--tasks", "a.yaml", "--limit", "0"), ["--limit 0", "at least 1", "raise it"]),
    "fewer examples than none": Mistake(
        judging("--tasks", "a.yaml", "--num-fewshot", "-1"),
        ["--num-fewshot -1", "at least 0", "raise it"],
    ),
    "results over their task": Mistake(
        lambda p: judging("--tasks", p.path("corpus.txt"), "--output", p.path("corpus.txt"))(p),
        ["corpus.txt", "is read", "name another"],
    ),
    "results in a folder": Mistake(
        lambda p: judging("--tasks", "a.yaml", "--output", p.path("cache"))(p),
        ["cache", "no regular file", "name a file"],
    ),
    "a task of nothing": Mistake(judging_alone("task: a"), ["a.yaml", "no dataset_path"]),
    "a task that would be downloaded": Mistake(
        judging_alone("task: a\ndataset_path: wiki"), ["a.yaml", "downloaded", "save the data"]
    ),
    "judging on no device": Mistake(judging_alone("task: a\ndataset_path: json", "--device", "tpu"), ["tpu", "cpu"]),
    "judging nobody": Mistake(without_harness, ["run", "does not exist", "expertmesh train"]),
    "tasks without the harness": Mistake(with_run(without_harness), ["needs lm-evaluation-harness", "pip install"]),
}

MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "rms_norm_eps": 1e-5,
}
TENSOR = {"dtype": "F32", "shape": [512, 16], "data_offsets": [0, 512 * 16 * 4]}


def safetensors(header: object, size: int = 512 * 16 * 4) -> bytes:
    """A file of tensors with this header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(size)


def hub(*, tokenizer: bytes | None = None, weights: bytes | str = b"", **changes: Any) -> Words:
    """A conversion of a Mixtral of the hub with other values, weights (text: an index of them) and tokenizer."""

    def prepare(place: Place) -> list[str]:
        folder = Path(place.path("hub"))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MIXTRAL | changes))
        usual = (place.finished / "tokenizer.json").read_bytes()
        (folder / "tokenizer.json").write_bytes(usual if tokenizer is None else tokenizer)
        if isinstance(weights, str):
            (folder / "model.safetensors.index.json").write_text(weights)
        elif weights:
            (folder / "model.safetensors").write_bytes(weights)
        return ["convert", "--from", str(folder), "--to", place.path("new")]

    return prepare


HUB = {
    "a model of the hub without weights": Mistake(hub(), ["has neither", "give a folder"]),
    "a tokenizer of the hub that is none": Mistake(
        hub(tokenizer=b"{", weights=safetensors({})), ["not a readable tokenizer", ";"], code=1
    ),
    "a tokenizer of another model of the hub": Mistake(
        hub(vocab_size=300), ["512 tokens and the model 300", "of another run"], code=1
    ),
    "a width in words": Mistake(hub(hidden_size="wide"), ["hidden_size='wide'", "whole number", ";"]),
    "a width in a list": Mistake(hub(hidden_size=[1]), ["hidden_size=[1]", "whole number", ";"]),
    "a model of several types": Mistake(hub(model_type=["x"]), ["model_type", "none that runs"]),
    "an activation in a list": Mistake(hub(hidden_act=["silu"]), ["hidden_act", "none of"]),
    "positions in words": Mistake(hub(rope_parameters="default"), ["rope_parameters", "restore"]),
    "weights that are no file of tensors": Mistake(
        hub(weights=b"x" * 99), ["no safetensors file", "restore it from the hub"], code=1
    ),
    "a header that is a list": Mistake(hub(weights=safetensors([])), ["no safetensors file", "restore it"], code=1),
    "a tensor without a place": Mistake(
        hub(weights=safetensors({"a": {"dtype": "F32", "shape": [1]}})),
        ["no valid entry for a", "restore it"],
        code=1,
    ),
    "a tensor larger than its place": Mistake(
        hub(weights=safetensors({"model.embed_tokens.weight": TENSOR | {"data_offsets": [0, 4]}})),
        ["bytes and its shape", "restore it"],
        code=1,
    ),
    "a tensor of negative size": Mistake(
        hub(weights=safetensors({"a": TENSOR | {"shape": [-512, -16]}})),
        ["bytes and its shape", "restore it"],
        code=1,
    ),
    "tensors that are missing": Mistake(
        hub(weights=safetensors({"model.embed_tokens.weight": TENSOR})), ["has no tensor"], code=1
    ),
    "an index without files": Mistake(
        hub(weights='{"weight_map": []}'), ["index.json", "beside it", "restore it"], code=1
    ),
    "an index that leads elsewhere": Mistake(
        hub(weights='{"weight_map": {"a": "../corpus.txt"}}'),
        ["../corpus.txt", "beside it"],
        code=1,
    ),
    "an index of a file that is not there": Mistake(
        hub(weights='{"weight_map": {"a": "b.safetensors"}}'), ["b.safetensors", "missing"], code=1
    ),
    "a conversion of a model of images": Mistake(
        state_with(CONVERT, config={"family": "swin"}),
        ["--from", "family swin", "expertmesh export"],
    ),
    "a conversion over a file": Mistake(
        with_run(lambda p: ["convert", "--from", p.path("run"), "--to", p.path("corpus.txt")]),
        ["corpus.txt", "exists already", "choose another"],
    ),
}

WSD = ("--optim.schedule", "wsd")


def beginning(*words: str) -> Words:
    """A run that begins with the finished one: @ stands for its folder."""
    return with_run(lambda p: p.train(*(p.path("run") if w == "@" else w for w in words), run="new"))


BEGIN = {
    "a branch of no trunk": Mistake(
        beginning("--train.branch-from", "no/run", *WSD), ["no/run", "does not exist", "trunk"]
    ),
    "a branch of a cosine": Mistake(beginning("--train.branch-from", "@", *WSD), ["--optim.schedule", "cosine", "wsd"]),
    "a branch with a cosine": Mistake(
        beginning("--train.branch-from", "@"), ["--train.branch-from", "wsd", "both runs"]
    ),
    "a branch of a file": Mistake(
        lambda p: p.train("--train.branch-from", p.path("corpus.txt"), *WSD),
        ["corpus.txt", "is no folder", "trunk"],
    ),
    "a branch of nobody's": Mistake(
        beginning("--train.branch-from", "~nosuchuser/x", *WSD), ["no such user", "whole path"]
    ),
    "two beginnings": Mistake(
        beginning("--train.branch-from", "@", "--train.init-from", "@", *WSD),
        ["--train.branch-from", "conflicts", "--train.init-from"],
    ),
    "frozen parts that are none": Mistake(
        beginning("--train.freeze", "attention"),
        ["--train.freeze attention", "experts, router", ";"],
    ),
    "frozen parts twice": Mistake(beginning("--train.freeze", "router,router"), ["--train.freeze", "twice", ";"]),
    "frozen experts of a dense model": Mistake(
        beginning("--train.freeze", "experts", "--model.moe.num-experts", "none"),
        ["--train.freeze", "no experts", ";"],
    ),
    "a teacher of another vocabulary": Mistake(
        beginning("--distill.teacher", "@", "--model.vocab-size", "400"),
        ["--distill.teacher", "vocabulary of 512", "same vocabulary"],
        may_add=("new/", "cache/"),
    ),
    "a teacher that is a file": Mistake(
        lambda p: p.train("--distill.teacher", p.path("corpus.txt")),
        ["corpus.txt", "is no folder", "train"],
    ),
    "a teacher who never speaks": Mistake(
        beginning("--distill.teacher", "@", "--distill.until", "0"),
        ["--distill.until 0", "greater than 0", ";"],
    ),
    "checkpoints kept between others": Mistake(
        beginning("--train.keep-every", "3", "--train.checkpoint-every", "2"),
        ["--train.keep-every 3", "multiple", ";"],
    ),
    "weights of another family": Mistake(
        with_run(lambda p: p.train("--train.init-from", p.path("run"), recipe="translate-test")),
        ["--train.init-from", "family gpt and this run of seq2seq", "one of the same"],
    ),
    "weights of no run": Mistake(
        lambda p: p.train("--train.init-from", p.path("cache")), ["cache", "no config.json", ";"]
    ),
}

NEWEST_VERBS = {
    "fewer experts below a file": Mistake(
        with_run(lambda p: experts(p, "prune", "run", "--keep", "2", to="corpus.txt/x")),
        ["--to", "below the file", "choose another folder"],
    ),
    "fewer experts over a run": Mistake(
        with_run(lambda p: experts(p, "prune", "run", "--keep", "2", to="run")),
        ["--to", "exists already", "choose another folder"],
    ),
    "as many experts as there are": Mistake(
        with_run(lambda p: experts(p, "prune", "run", "--keep", "4", to="new")),
        ["--keep 4", "below the 4", "lower it"],
    ),
    "experts of nobody's": Mistake(
        with_run(lambda p: experts(p, "join", "run", "none", to="new")), ["none", "does not exist"]
    ),
    "a sweep of rates that are no numbers": Mistake(
        lambda p: ["sweep", *p.train("--rates", "1e-3,nan")[1:]], ["--rates nan", "finite"]
    ),
    "a sweep with a rate of its own": Mistake(
        lambda p: ["sweep", *p.train("--rates", "1e-3", "--optim.lr", "1")[1:]],
        ["--optim.lr", "no effect in a sweep", "leave it out"],
    ),
    "a sweep of one rate twice": Mistake(
        lambda p: ["sweep", *p.train("--rates", "1e-3,1e-3")[1:]], ["--rates", "each once"]
    ),
    "a sweep below a file": Mistake(
        lambda p: ["sweep", *p.train("--rates", "1e-3", run="corpus.txt")[1:]],
        ["--train.run-dir", "below a file", "choose a folder"],
    ),
    "a plot in no folder": Mistake(
        plain("bench", "comm", "--plot", "no/plot.svg"), ["--plot no/plot.svg", "make it first"]
    ),
    "a plot on a device": Mistake(plain("bench", "comm", "--plot", "/dev/null"), ["/dev/null", "no regular file"]),
    "a bench of endless bytes": Mistake(
        plain("bench", "comm", "--largest-mib", "inf"),
        ["--largest-mib inf", "finite number", "example"],
    ),
    "a bench of bytes that are no number": Mistake(
        plain("bench", "comm", "--largest-mib", "nan"),
        ["--largest-mib nan", "finite number", "example"],
    ),
    "nodes of fewer ranks than none": Mistake(
        plain("bench", "comm", "--ranks-per-node", "-2"), ["--ranks-per-node -2", "at least 1"]
    ),
}


def experts(place: Place, action: str, run: str, *words: str, to: str) -> list[str]:
    """A call of `experts`; the second run of `join` is a word without a dash."""
    named = [w if w.startswith("-") or w.isdecimal() else place.path(w) for w in words]
    return ["experts", action, place.path(run), *named, "--to", place.path(to)]


MODELS = {
    "images": IMAGES,
    "classify": CLASSIFY,
    "translate, its files": TRANSLATED,
    "evaluate": EVALUATE,
    "hub": HUB,
    "beginnings": BEGIN,
    "newest verbs": NEWEST_VERBS,
}
