"""A base model, prompts and rewards of the tests of reinforcement learning."""

import json

import pytest
from tests.support.hub_text import hub_folder

REWARDS = '''
def early(completion_ids, **kwargs):
    """The share of tokens among the first hundred."""
    return [sum(i < 100 for i in ids) / len(ids) for ids in completion_ids]

def long(completions, answer, log_metric, **kwargs):
    log_metric("seen", len(answer))
    return [float(len(one) > 3) if right % 2 else None for one, right in zip(completions, answer)]
'''


@pytest.fixture(scope="package")
def base(tmp_path_factory):
    return hub_folder(tmp_path_factory.mktemp("base") / "tiny")


@pytest.fixture(scope="package")
def rewards(tmp_path_factory):
    path = tmp_path_factory.mktemp("rewards") / "rewards.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture(scope="package")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [{"prompt": f"say {n}" + "." * (n % 5), "answer": n} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture
def options(base, prompts, rewards, tmp_path):
    """Options of `train` for four updates with groups of three; the first is its word."""
    text = f"""objective.name grpo data.path {prompts} reward.functions {rewards}:early rl.group 3 rl.max-tokens 6
        train.run-dir {tmp_path}/run train.batch-size 4 train.steps 4 train.tensorboard false train.device cpu
        train.dtype float32 optim.lr 1e-3 train.checkpoint-every 2 train.eval-every 4 data.completions text"""
    words = text.split()
    return {"": str(base), **dict(zip(words[::2], words[1::2], strict=True))}
