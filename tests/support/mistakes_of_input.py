"""Four kin and more of every defect that strangers met, by what they typed and by the data that they gave."""

import gzip
import os
import socket
from collections.abc import Callable
from pathlib import Path

from tests.support.mistakes import Mistake, Words, plain, training, wrong_value
from tests.support.place import TEXT, Place


def texts(name: str, **files: bytes) -> Words:
    """Training on a folder of these files; their names have _ for a dot."""

    def prepare(place: Place) -> list[str]:
        folder = Path(place.path(name))
        folder.mkdir()
        for file, content in files.items():
            (folder / file.replace("_", ".")).write_bytes(content)
        return place.train("--data.path", str(folder))

    return prepare


def text(name: str, content: bytes, *words: str) -> Words:
    """Training on one file."""

    def prepare(place: Place) -> list[str]:
        Path(place.path(name)).write_bytes(content)
        return place.train("--data.path", place.path(name), *words)

    return prepare


def special(make: Callable[[Path], object]) -> Words:
    """Training on what is no file."""

    def prepare(place: Place) -> list[str]:
        path = Path(place.path("special"))
        make(path)
        return place.train("--data.path", str(path))

    return prepare


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end, Inside(path.parent):
        end.bind(path.name)  # a whole path may be too long for a socket


class Inside:
    def __init__(self, folder: Path) -> None:
        self.folder, self.before = folder, Path.cwd()

    def __enter__(self) -> None:
        os.chdir(self.folder)

    def __exit__(self, *_: object) -> None:
        os.chdir(self.before)


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


DATA = {
    "two files of one text": Mistake(
        texts("twins", a_txt=b"the same\n", b_txt=b"the same\n"),
        ["cannot be split", "give more text"],
    ),
    "only so many bytes that nothing is left": Mistake(
        training("--data.max-bytes", "1"), ["1 different text", "split", "more text"]
    ),
    "a pipe": Mistake(special(os.mkfifo), ["special", "no regular file", "write it to a file"]),
    "a socket": Mistake(special(bind_socket), ["special", "no regular file", "write it"]),
    "a device": Mistake(training("--data.path", "/dev/null"), ["/dev/null", "no regular file", "write"]),
    "a file that nobody may read": Mistake(
        training("--data.path", "/proc/self/mem"),
        ["/proc/self/mem", "cannot be read (Input/output error)", "check it"],
    ),
    "a folder of hidden files": Mistake(
        special(lambda path: (path.mkdir(), (path / ".hidden").write_text("x"))),
        ["special", "no files", "give text"],
    ),
    "a link to itself": Mistake(special(link_to_itself), ["special", "does not exist", "give"]),
    "a link to nothing": Mistake(special(lambda path: path.symlink_to("gone")), ["special", "does not exist", "give"]),
    "a folder of links to nothing": Mistake(
        special(lambda path: (path.mkdir(), (path / "a").symlink_to("gone"))),
        ["special", "no files", "no regular files", "give text files"],
    ),
    "a packed file that is cut off": Mistake(
        text("cut.gz", gzip.compress(TEXT.encode())[:-20]), ["cut.gz", "damaged", "another file"]
    ),
    "a packed file that is none": Mistake(text("plain.gz", TEXT.encode()), ["plain.gz", "damaged", "another file"]),
    "a packed image": Mistake(
        text("image.gz", gzip.compress(bytes(range(256)) * 9)), ["image.gz", "binary", "give text"]
    ),
    "lines that are no JSON": Mistake(
        text("a.jsonl", b"{'text': 'x'}\n" * 99), ["a.jsonl", "no JSON object", "write one"]
    ),
    "a line nested without end": Mistake(
        text("a.jsonl", (b"[" * 50_000 + b"\n") * 9), ["a.jsonl", "no JSON object", "write one"]
    ),
    "lines without a text": Mistake(
        text("a.jsonl", b'{"body": "x"}\n' * 99),
        ["a.jsonl", "first object has body", "--data.column NAME"],
    ),
    "an empty file of lines": Mistake(text("a.jsonl", b"\n"), ["a.jsonl", "no text", "give text"]),
    "text in two bytes a letter, without a mark": Mistake(
        text("wide.txt", TEXT.encode("utf-16-le")), ["wide.txt", "--data.encoding utf-16-le"]
    ),
    "a pattern that matches nothing": Mistake(
        training("--data.path", "no/*.such"), ["no/*.such", "matches nothing", "give"]
    ),
    "a weight of nothing": Mistake(
        lambda p: p.train("--data.path", f"{p.path('corpus.txt')}:0"),
        ["corpus.txt:0", "above 0", "leave the path out"],
    ),
    "a weight that fills the disk": Mistake(
        lambda p: p.train("--data.path", f"{p.path('corpus.txt')}:99999999999"),
        ["corpus.txt:99999999999", "at most 1,000", "lower the weights of the others"],
    ),
    "a weight of one path": Mistake(
        lambda p: p.train("--data.path", f"{p.path('corpus.txt')}:3"),
        ["corpus.txt:3", "beside other paths", "leave it out"],
    ),
    "tokens without their tokenizer": Mistake(
        texts("tokens", a_bin=b"x" * 99, a_idx=b"MMIDIDX\0\0" + b"\0" * 99),
        ["a.bin", "token ids", "--data.tokenizer"],
    ),
    "a tokenizer for text": Mistake(
        training("--data.tokenizer", "tokenizer.json"), ["--data.tokenizer", ".bin", "leave it out"]
    ),
    "a tokenizer that is not there": wrong_value("--data.encode-with", "no/tokenizer.json", "restore"),
    "a cache below a file": Mistake(
        lambda p: p.train("--data.cache-dir", p.path("corpus.txt/cache")),
        ["--data.cache-dir", "below a file", "choose a folder"],
    ),
}

NUMBERS = {
    "a number of 5,000 digits": Mistake(training("--train.steps", "9" * 5000), ["--train.steps 999", ";"]),
    "a name longer than a name may be": Mistake(
        training("--train.run-dir", "x" * 300),
        ["File name too long", "choose a shorter name"],
        code=1,
    ),
    "data with a name longer than a name may be": Mistake(
        training("--data.path", "x" * 300), ["x" * 300, "choose a shorter name"], code=1
    ),
    "more threads than cores": Mistake(
        training("--parallel.num-threads", "100000"), ["100000", "cores", "use at most"]
    ),
}

LIMITS = {
    f"{name} beyond the machine": Mistake(training(*words), [text])
    for name, (words, text) in {
        "width": (["--model.dim", "1048576"], "--model.dim 1048576: too large for memory"),
        "hidden size": (
            ["--model.moe.hidden-dim", "9999999999"],
            "--model.moe.hidden-dim 9999999999: too large for memory",
        ),
        "experts": (
            ["--model.moe.num-experts", "100000000"],
            "--model.moe.num-experts 100000000: too large for memory",
        ),
        "batch": (
            ["--train.batch-size", "1000000000"],
            "lower --train.micro-batch-size",
        ),
    }.items()
}

IDLE = {
    "experts of a dense model": Mistake(
        training("--model.moe.num-experts", "none", "--model.moe.top-k", "3"),
        ["--model.moe.top-k 3", "no effect in a dense model", "leave"],
    ),
    "scale of no noise": Mistake(
        training("--model.moe.router-noise-std", "0.5"),
        ["router-noise-std 0.5", "no effect", "leave"],
    ),
    "least capacity without a capacity": Mistake(
        training("--model.moe.min-capacity", "9"), ["min-capacity 9", "no effect", "leave"]
    ),
    "whom to drop when nobody is": Mistake(
        training("--model.moe.drop-policy", "weight"), ["drop-policy weight", "no effect", "leave"]
    ),
    "decay of a cosine": Mistake(training("--optim.decay-fraction", "0.5"), ["decay-fraction 0.5", "no effect", "wsd"]),
    "dimensions of another router": Mistake(
        training("--model.moe.cosine-dim", "8"), ["cosine-dim 8", "no effect", "leave"]
    ),
    "no dimensions of another router, in a dry run": Mistake(
        training("--model.moe.cosine-dim", "0", "--dry-run"), ["cosine-dim 0", "greater than 0"]
    ),
    "a gate of no shared experts": Mistake(
        training("--model.moe.shared-gate"), ["shared-gate", "without shared experts", "leave"]
    ),
    "a lesson without a teacher": wrong_value("--distill.beta", "2", "without a teacher", "leave it out"),
    "ends of nodes that nobody asks for": wrong_value("--parallel.ranks-per-node", "2", "leave it out"),
    "a policy of experts that choose": Mistake(
        training("--model.moe.router", "expert_choice", "--model.moe.drop-policy", "priority"),
        ["drop-policy priority", "no effect", "leave"],
    ),
    "a policy of a dense model": Mistake(
        training("--model.moe.num-experts", "none", "--model.moe.drop-policy", "priority"),
        ["drop-policy priority", "no effect in a dense model", "leave"],
    ),
}


def as_ranks(count: int, *words: str) -> Words:
    """A dry run as the first of so many processes of torchrun."""

    def prepare(place: Place) -> list[str]:
        names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": count, "TORCHELASTIC_RUN_ID": "1"}
        for name, value in names.items():
            place.patch.setenv(name, str(value))
        return place.train("--train.batch-size", str(4 * count), "--dry-run", *words)

    return prepare


RANKS = {
    "three ranks for four experts": Mistake(as_ranks(3), ["3 ranks", "--parallel.dp-replicate-degree 3"]),
    "five ranks": Mistake(as_ranks(5), ["5 ranks", "--parallel.dp-replicate-degree 5"]),
    "seven ranks that route over seven": Mistake(
        as_ranks(7, "--parallel.route-degree", "7"), ["7 ranks", "--parallel.dp-replicate-degree 7"]
    ),
    "three ranks for one sequence": Mistake(
        as_ranks(3, "--parallel.tp-degree", "3"),
        ["3 ranks", "--parallel.tp-degree 1 with --parallel.dp-replicate-degree 3"],
    ),
    "more copies than ranks": Mistake(
        as_ranks(2, "--parallel.dp-replicate-degree", "3"),
        ["--parallel.dp-replicate-degree 3", "2 ranks"],
    ),
    "a degree that does not divide": Mistake(
        as_ranks(4, "--parallel.ep-degree", "3"), ["--parallel.ep-degree 3", "4 ranks"]
    ),
    "degrees and one process": wrong_value("--parallel.ep-degree", "2", "one rank", "torchrun"),
}


def config_file(content: str | bytes, *words: str) -> Words:
    def prepare(place: Place) -> list[str]:
        path = Path(place.path("run.yaml"))
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return place.train("--config", str(path), *words)

    return prepare


CONFIG_FILE = {
    "a file of options with a command": Mistake(
        config_file("!!python/object/apply:os.system ['touch run/owned']"),
        ["is no YAML", "correct"],
    ),
    "a file of options with a module": Mistake(
        config_file("family: 'os:system'"), ["names no module to import", "--family os:system"]
    ),
    "a file of options in no encoding": Mistake(
        config_file(b"\xff\xfe\0"), ["run.yaml", "no UTF-16-LE text", "give text"]
    ),
    "a list of options": Mistake(config_file("- train"), ["not sections", "write for example"]),
    "an option of no section": Mistake(
        config_file("trian: {steps: 3}"), ["unknown option trian", "did you mean train?"]
    ),
    "a misspelled option in a file": Mistake(
        config_file("train: {stepz: 3}"), ["train.stepz", "did you mean train.steps?"]
    ),
    "a file of options that is a folder": Mistake(
        lambda p: p.train("--config", p.path("cache")), ["cannot be read", "give a text file"]
    ),
    "a file of options nested without end": Mistake(config_file("[" * 5000), ["run.yaml", "is no YAML", "correct it"]),
    "a NUL in a file of options": Mistake(
        config_file('data: {encode_with: "a\\0b"}'), ["a\\x00b", "without NUL", "rename the file"]
    ),
    "no file of options": Mistake(
        lambda p: p.train("--config", p.path("none.yaml")), ["does not exist", "check the path"]
    ),
}

OTHER_VERBS = {
    "unknown word of doctor": Mistake(plain("doctor", "--fast"), ["--fast", "--help"]),
    "a bench of nothing": Mistake(plain("bench", "disk"), ["disk", "comm", "must be one of"]),
    "a bench of one rank": Mistake(plain("bench", "comm"), ["one rank", "torchrun"]),
    "a bench of no bytes": Mistake(
        plain("bench", "comm", "--largest-mib", "0"),
        ["--largest-mib 0", "at least 0.000244141", "for example"],
    ),
    "a conversion from nothing": Mistake(
        lambda p: ["convert", "--from", p.path("none"), "--to", p.path("out")], ["none", ";"]
    ),
    "a conversion to a type": Mistake(
        lambda p: ["convert", "--from", p.path("x"), "--to", p.path("y"), "--dtype", "int3"],
        ["int3", "float32", "must be one of"],
    ),
}

INPUT = {
    "A9 data": DATA,
    "A11 numbers and names": NUMBERS,
    "A11 limits": LIMITS,
    "A12 options without effect": IDLE,
    "A15 ranks": RANKS,
    "B3 file of options": CONFIG_FILE,
    "other verbs": OTHER_VERBS,
}
