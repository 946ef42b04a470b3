"""Every objective has one process's losses for any micro-batch, with packing, and on any layout of ranks."""

import json

import pytest
import torch.distributed as dist
from tests.support.pairwise import covering
from tests.support.runs import assert_same_lines, lines_of, train_quietly

from expertmesh.errors import ConfigError
from expertmesh.models.gpt.family import GPT
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.training.init_from import with_init_from

BASE = {
    "model.vocab_size": 300,
    "model.dim": 16,
    "model.num_layers": 2,
    "model.max_seq_len": 96,
    "model.ffn_hidden_dim": 32,
    "model.moe.hidden_dim": 16,
    "model.moe_every": 2,
    "model.tie_embeddings": False,
    "data.seq_len": 96,
    "data.validation_fraction": 0.2,
    "optim.warmup_steps": 0,
    "optim.lr": 3e-3,
    "train.steps": 2,
    "train.batch_size": 8,
    "train.dtype": "float64",
    "train.device": "cpu",
    "train.eval_batches": 1,
    "train.tensorboard": False,
}
LORA = {
    "adapter.kind": "lora",
    "adapter.rank": 4,
    "adapter.targets": ("attention", "dense", "experts", "head"),
}
REWARDS = """
def early(completion_ids, log_metric, **kwargs):
    log_metric("seen", len(completion_ids))
    return [sum(i < 150 for i in ids) / len(ids) for ids in completion_ids]
"""
OBJECTIVES = {
    "sft": LORA,
    "dpo": {"objective.sft_weight": 0.5, "train.freeze": ("router",)},
    # replayed experts, a reference copy, a ratio that sees whole answers
    "grpo": {
        "rl.exact": False,
        "rl.group": 2,
        "rl.max_tokens": 5,
        "rl.kl_beta": 0.1,
        "rl.ratio": "sequence",
        "rl.updates": 2,
        "rl.entropy_coef": 0.1,
        "data.completions": "text",
        "train.freeze": ("router",),
    },
}
COMPARED = {
    "sft": ("loss", "grad_norm", "eval_loss", "eval_bits_per_byte"),
    "dpo": (
        "loss",
        "grad_norm",
        "margin",
        "logp_chosen",
        "entropy",
        "tokens",
        "eval_loss",
        "eval_margin",
    ),
    "grpo": ("grad_norm", "reward", "length", "entropy", "kl", "clipped", "eval_reward", "tokens"),
}


def records(name, n):
    if name == "sft":
        answer = {"role": "assistant", "content": f"well {n * n}"}
        return {"messages": [{"role": "user", "content": f"say {n}"}, answer]}
    told = {"prompt": f"say {n}" + "." * (n % 5)}
    return told if name == "grpo" else told | {"chosen": f"well {n * n}", "rejected": "no " * (1 + n % 4)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alike")
    for name in OBJECTIVES:
        lines = [json.dumps(records(name, n)) for n in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "rewards.py").write_text(REWARDS)
    config = {"train.steps": 1, "train.run_dir": str(folder / "base"), "data.max_bytes": 60_000}
    train_quietly(RECIPES["gpt-moe-test"]().updated(BASE | config))
    return folder


def config_of(folder, objective, name, changes):
    places = {
        "objective.name": objective,
        "data.path": str(folder / f"{objective}.jsonl"),
        "data.cache_dir": str(folder / "cache"),
        "train.run_dir": str(folder / f"{objective}-{name}"),
        "train.init_from": str(folder / "base"),
    }
    if objective == "grpo":
        places["reward.functions"] = (f"{folder}/rewards.py:early",)
    return RECIPES["gpt-moe-test"]().updated(BASE | places | OBJECTIVES[objective] | changes)


def run(folder, objective, name, changes):
    """Train on the ranks there are; the lines of metrics.jsonl on the first of them."""
    config = config_of(folder, objective, name, changes)
    train_quietly(config)
    leader = not dist.is_initialized() or dist.get_rank() == 0
    return lines_of(config.train.run_dir) if leader else None


@pytest.fixture(scope="module")
def whole(folder):
    """Lines of runs of one process whose batch is one micro-batch."""
    return {name: run(folder, name, "whole", {}) for name in OBJECTIVES}


@pytest.mark.parametrize("size", [1, 2, 4])  # 8 is the whole batch
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_micro_batches_change_nothing(objective, size, folder, whole):
    found = run(folder, objective, f"micro-{size}", {"train.micro_batch_size": size})
    assert_same_lines(found, whole[objective], *COMPARED[objective])


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_packing_changes_nothing(objective, folder):
    """A batch of all samples, in as many rows as they need."""
    lines = {}
    for pack in (False, True):
        config = config_of(folder, objective, "unused", {"data.pack": pack})
        size = GPT.open_task(with_init_from(config, GPT)).prepare().num_training
        changes = {"data.pack": pack, "train.batch_size": size, "train.steps": 1}
        lines[pack] = size, run(folder, objective, f"pack-{pack}", changes)
    assert lines[True][0] < lines[False][0]
    assert_same_lines(lines[True][1], lines[False][1], "loss", "grad_norm", "eval_loss")


LAYOUTS = covering(
    {
        "ep_degree": (1, 2, 4),
        "es_degree": (1, 2),
        "tp_degree": (1, 2),
        "dp_replicate_degree": (1, 2),
    },
    lambda row: row["ep_degree"] * row["es_degree"] * row["dp_replicate_degree"] <= 4,
)


def test_the_layouts_are_few():
    assert len(LAYOUTS) <= 8


CASES = [
    # every run of the tests tries each layout with one objective
    pytest.param(objective, layout, marks=() if (i + j) % 3 == 0 else pytest.mark.exhaustive)
    for i, layout in enumerate(LAYOUTS)
    for j, objective in enumerate(OBJECTIVES)
]


@pytest.mark.parametrize(("objective", "layout"), CASES)
def test_layouts_of_ranks_change_nothing(objective, layout, folder, whole, four_ranks):
    changes = {f"parallel.{name}": value for name, value in layout.items()}
    changes |= {"parallel.ep_degree": (layout["ep_degree"],), "train.micro_batch_size": 4}
    name = "-".join(map(str, layout.values()))
    found = four_ranks.run(run, folder, objective, name, changes)[0]
    assert_same_lines(found, whole[objective], *COMPARED[objective])


def test_exact_rollouts_on_ranks_that_share_sequences_are_refused_in_one_line(folder):
    with pytest.raises(ConfigError) as error:
        run(folder, "grpo", "exact", {"parallel.tp_degree": 2, "rl.exact": True})
    said = str(error.value)
    assert said.startswith("parallel.tp_degree=2: adds parts of products") and "\n" not in said
