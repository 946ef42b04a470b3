"""Reward functions of users: TRL's keywords unchanged, and one line with file and line for each mistake."""

import asyncio
import time

import pytest

from expertmesh.errors import ConfigError
from expertmesh.rl.rewards import Answered, find_rewards, rewarded, total

FILE = """
import asyncio, time

def plain(completions, **kwargs):
    return [float(len(one)) for one in completions]

def by_column(prompts, completions, answer, trainer_state, log_metric, **kwargs):
    log_metric("right", 0.5)
    return [float(a == c) + trainer_state for a, c in zip(answer, completions)]

def narrow(completion_ids):
    return [sum(ids) for ids in completion_ids]

async def slowly(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [1.0] * len(completions)

async def slowly_too(completions, **kwargs):
    await asyncio.sleep(0.2)
    return [2.0] * len(completions)

def some(completions, **kwargs):
    return [None if one == "b" else 1 for one in completions]

def none(completions, **kwargs):
    return [None] * len(completions)

def short(completions, **kwargs):
    return [1.0]

def nan(completions, **kwargs):
    return [1.0, float("nan"), 1.0]

def word(completions, **kwargs):
    return "good"

def words(completions, **kwargs):
    return ["good"] * len(completions)

def scalar(completions, **kwargs):
    return 1.0

def raises(completions, **kwargs):
    return [one["text"] for one in completions]

async def raises_later(completions, **kwargs):
    raise KeyError("text")

def sleeps(completions, **kwargs):
    time.sleep(3)

async def sleeps_too(completions, **kwargs):
    await asyncio.sleep(3)
"""
ANSWERED = Answered(
    prompts=["p"] * 3,
    completions=["a", "b", "ab"],
    completion_ids=[[1], [2], [1, 2]],
    columns={"answer": ["a", "x", "ab"]},
    where=["p.jsonl:1"] * 3,
    state=7,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rewards.py"
    path.write_text(FILE)
    return path


def values_of(file, *names, timeout=60.0, log=lambda name, value: None):
    functions = find_rewards([f"{file}:{name}" for name in names])
    return rewarded(functions, ANSWERED, timeout=timeout, log=log)


GOOD = {
    "plain": [1.0, 1.0, 2.0],
    "by_column": [8.0, 7.0, 8.0],
    "narrow": [1.0, 2.0, 3.0],
    "slowly": [1.0, 1.0, 1.0],
    "some": [1.0, None, 1.0],
}


@pytest.mark.parametrize("name", GOOD)
def test_functions_of_trl_work_unchanged(name, file):
    logged = []
    found = values_of(file, name, log=lambda *pair: logged.append(pair))
    assert found == {name: GOOD[name]}
    assert logged == ([("right", 0.5)] if name == "by_column" else [])


def test_async_functions_run_together(file):
    began = time.monotonic()
    assert values_of(file, "slowly", "slowly_too")["slowly_too"] == [2.0] * 3
    assert time.monotonic() - began < 0.39


def test_a_caller_with_a_loop_of_its_own(file):
    async def caller():
        return values_of(file, "slowly")

    assert asyncio.run(caller()) == {"slowly": [1.0] * 3}


def test_rewards_are_weighted_sums_of_what_applies(file):
    functions = find_rewards([f"{file}:plain:0.5", f"{file}:some:-2"])
    values = rewarded(functions, ANSWERED, timeout=60)
    assert total(functions, values, ANSWERED) == [-1.5, 0.5, -1.0]


def test_own_functions():
    functions = find_rewards(["exact", "number:2"])
    answered = Answered(
        prompts=["p"] * 3,
        completions=[" 4\n", [{"role": "assistant", "content": "so 1,004.0"}], "none"],
        completion_ids=[[1]] * 3,
        columns={"answer": [4, "#### 1004", "4"]},
        where=["p:1"] * 3,
    )
    values = rewarded(functions, answered, timeout=60)
    assert values == {"exact": [1.0, 0.0, 0.0], "number": [1.0, 1.0, 0.0]}


BAD = {
    "short": "returned 1 values for 3 answers; return one for each",
    "nan": "returned float nan for an answer to p.jsonl:1; return a finite number",
    "word": "returned str; return a list of 3 numbers",
    "words": "returned str 'good' for an answer to p.jsonl:1",
    "scalar": "returned float; return a list of 3 numbers",
    "raises": "TypeError",
    "raises_later": "KeyError",
    "sleeps": "has not answered within reward.timeout=0.3 s",
    "sleeps_too": "has not answered within reward.timeout=0.3 s",
    "none": "and all other functions returned None for an answer to p.jsonl:1",
}


@pytest.mark.parametrize("name", BAD)
def test_a_mistake_of_a_function_is_one_line_with_its_place(name, file):
    functions = find_rewards([f"{file}:{name}"])
    with pytest.raises(ConfigError) as error:
        total(functions, rewarded(functions, ANSWERED, timeout=0.3), ANSWERED)
    said = str(error.value)
    lines = FILE.splitlines()
    line = next(i for i, text in enumerate(lines, 1) if f"def {name}(" in text)
    assert f"{file}:{line}: {name} " in said and BAD[name] in said and "\n" not in said
    if name == "raises":
        assert f"{file}:{line + 1}" in said


SPECS = {
    "nothing": ([], "reinforcement learning needs a reward"),
    "no file": (["{}/x.py:f"], "there is no file"),
    "no function": (["{}/rewards.py:f"], "has no function f"),
    "no name": (["{}/rewards.py"], "is neither FILE.py:NAME"),
    "no weight": (["{}/rewards.py:plain:much"], "is neither FILE.py:NAME"),
    "twice": (["exact", "exact:2"], "is given twice"),
    "no weight but 0": (
        ["{}/rewards.py:plain:0", "exact:0"],
        "have weights of 0, and teach nothing",
    ),
    "no module": (["no.such.module:f"], "cannot be imported"),
    "broken": (["{}/broken.py:f"], "broken.py:2: "),
    "of a model": (["{}/model/r.py:f"], "is in the folder of a model, whose code is never run"),
    "of a downloaded model": (["{}/hub/deep/r.py:f"], "whose code is never run"),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_function_that_cannot_be_had_is_one_line(case, file, tmp_path):
    (tmp_path / "broken.py").write_text("x = 1\nraise RuntimeError('two\\nlines')")
    for folder in ("model", "hub/deep"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "r.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "model" / "config.json").write_text("{}")
    specs, said = SPECS[case]
    with pytest.raises(ConfigError) as error:
        find_rewards([spec.format(tmp_path) for spec in specs], forbidden=tmp_path / "hub")
    assert said in str(error.value) and "\n" not in str(error.value)
