"""`train --dry-run`: what a run would need, on one process and on each of several ranks."""

import re

import pytest

from expertmesh.cli.train import describe, run
from expertmesh.errors import ConfigError
from expertmesh.models.gpt.costs import gpt_costs
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES

DEGREES = ["--parallel.ep-degree", "4", "--parallel.dp-replicate-degree", "2"]


def memory_line(text):
    return next(line for line in text.splitlines() if line.startswith("memory"))


def test_one_process(capsys):
    assert run(["gpt-moe-test", "--train.dtype", "bfloat16", "--dry-run"]) == 0
    assert re.search(r"memory +[0-9.]+ MiB: weights .* compute copies", capsys.readouterr().out)


def test_degrees_say_how_many_ranks(capsys):
    assert run(["gpt-moe-test", "--train.dtype", "float32", "--dry-run", *DEGREES]) == 0
    line = memory_line(capsys.readouterr().out)
    config = RECIPES["gpt-moe-test"]().updated({"parallel.ep_degree": 4, "parallel.dp_replicate_degree": 2})
    each = gpt_costs(config, num_ranks=8, dtype="float32").memory
    assert "of each of 8 ranks" in line
    assert f"weights {each.weights_bytes / 1024:.1f} KiB" in line
    assert f"optimizer {each.optimizer_bytes / 1024:.1f} KiB" in line


def test_only_the_first_rank_prints(capsys, monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert run(["gpt-moe-test", "--dry-run"]) == 0
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")
    assert run(["gpt-moe-test", "--dry-run"]) == 0
    assert "of each of 4 ranks" in memory_line(capsys.readouterr().out)


def test_degrees_that_do_not_fit():
    config = RECIPES["gpt-moe-test"]().updated({"parallel.route_degree": 3})
    with pytest.raises(ConfigError, match="route_degree=3: must divide the 4 ranks"):
        describe(config, GPT, recipe="test", num_ranks=4)
