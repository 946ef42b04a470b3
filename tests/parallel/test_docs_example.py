"""The Python of docs/parallelism.md runs on two ranks."""

import re
from pathlib import Path

import torch

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def run_example():
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[1]
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    names["world"].close()
    return names["loss"].item()


def test_the_example_runs(two_ranks):
    assert all(torch.tensor(loss).isfinite() for loss in two_ranks.run(run_example))
