"""A folder in which the command line is called, with a corpus and a finished run that may be spoiled."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

TEXT = "".join(f"def f{i}(x):\n    return x + {i}\n\n" for i in range(3000))


@dataclass
class Place:
    """A folder with a corpus and, on demand, a finished run that a mistake may spoil."""

    folder: Path
    finished: Path
    patch: pytest.MonkeyPatch
    open_until_the_end: ExitStack

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def train(self, *words: str, recipe: str = "gpt-moe-test", run: str = "run") -> list[str]:
        """Words of a training call that would work."""
        given = {word.split("=")[0] for word in words}
        usual = {
            "--train.steps": "2",
            "--train.run-dir": self.path(run),
            "--data.path": self.path("corpus.txt"),
            "--data.cache-dir": self.path("cache"),
            "--train.device": "cpu",
        }
        rest = [word for name, value in usual.items() if name not in given for word in (name, value)]
        return ["train", recipe, *words, *rest]

    def generate(self, *words: str, prompt: str = "def", run: str = "run") -> list[str]:
        return ["generate", self.path(run), *words, prompt]

    def with_run(self, name: str = "run") -> Path:
        """A copy of a finished run of two steps."""
        shutil.copytree(self.finished, self.folder / name)
        return self.folder / name
