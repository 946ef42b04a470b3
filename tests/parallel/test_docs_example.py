"""The Python of docs/parallelism.md runs on two ranks."""

import re
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"


def run_example(number):
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[number]
    names = {"__name__": "example"}
    exec(compile(code, str(PAGE), "exec"), names)
    names["world"].close()
    return names["loss"].item()


@pytest.mark.parametrize("number", [0, 1])
def test_the_examples_run(two_ranks, number):
    assert all(torch.tensor(loss).isfinite() for loss in two_ranks.run(run_example, number))
