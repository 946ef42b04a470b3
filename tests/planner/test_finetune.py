"""Plans of fine-tuning: what rests is counted as training counts it, and what learns is what has gradients."""

import json
import shlex

import pytest

import expertmesh as em
from expertmesh.cli import main as front
from expertmesh.cli.flags import parse_run_config
from expertmesh.costs.rank_layout import RankLayout
from expertmesh.costs.step_time import raw_step
from expertmesh.models.gpt.costs import gpt_costs

HUB = {
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    return str(tmp_path)


CASES = {
    "full": {"finetune": "full"},
    "lora": {"finetune": "lora"},
    "ranks": {"finetune": "lora", "rank": 64, "expert_rank": 4},
    "attention alone": {"finetune": "lora", "targets": ("attention",)},
    "int4": {"finetune": "lora", "base": "int4"},
    "nf4, longer": {"finetune": "lora", "base": "nf4", "max_context": 4096},
    "int8": {"finetune": "lora", "base": "int8"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cluster", ["h100x1", "h100x8"])
def test_the_command_starts_what_was_planned(case, cluster, folder):
    """Words of training give a run whose dry run has the same bytes."""
    found = em.plan(folder, cluster=cluster, **CASES[case])
    words = shlex.split(found.command.partition(" train ")[2].replace("--data.path DATA", ""))
    config = parse_run_config(words).config
    assert config.adapter.kind == {"full": "none"}.get(case, "lora")
    layout, work = found.best.layout, found.problem.work
    costs = gpt_costs(
        config.updated({"model": found.model.config.model}),
        num_ranks=layout.num_ranks,
        dtype=work.precision,
        on_gpu=True,
    )
    assert costs.memory == found.best.memory
    assert found.problem.batch % 16 == 0


def held(folder, **options):
    return em.plan(folder, cluster="h100x1", **options).best.memory


def test_a_resting_base_has_no_gradients_and_few_bytes(folder):
    full, lora = held(folder, finetune="full"), held(folder, finetune="lora")
    assert lora.gradients_bytes < 0.2 * full.gradients_bytes
    assert lora.optimizer_bytes < 0.2 * full.optimizer_bytes
    weights = [
        held(folder, finetune="lora", base=base).weights_bytes for base in ("float32", "bfloat16", "int8", "int4")
    ]
    assert weights == sorted(weights, reverse=True) and weights[0] > 2 * weights[-1]


@pytest.mark.parametrize(("checkpointing", "ratio"), [("none", 2 / 3), ("full", 3 / 4)])
def test_adapters_save_the_gradients_of_weights_and_cost_launches(checkpointing, ratio):
    full, lora, packed = (
        em.plan("qwen3-30b", cluster="h100x64", **options).problem
        for options in (
            {"finetune": "full"},
            {"finetune": "lora"},
            {"finetune": "lora", "base": "int4"},
        )
    )
    layout = RankLayout(64, route_degree=8, checkpointing=checkpointing)
    whole, resting, rounded = (
        raw_step(problem.sizes, layout, problem.work, problem.cluster) for problem in (full, lora, packed)
    )
    assert resting.grouped_s == pytest.approx(ratio * whole.grouped_s)
    assert resting.dense_s < whole.dense_s and resting.gathers_s < whole.gathers_s
    assert resting.host_layers > whole.host_layers
    assert resting.optimizer_s < 0.2 * whole.optimizer_s
    assert rounded.rows_s > resting.rows_s and rounded.dense_s == resting.dense_s


def test_hours_are_of_text():
    whole, half = (
        em.plan("qwen3-30b", cluster="h100x8", finetune="lora", tokens=1e7, filled=filled) for filled in (1.0, 0.5)
    )
    assert half.train_s == pytest.approx(2 * whole.train_s)
    assert "hours (" in whole.text()


WRONG = [
    (["--rank", "8"], "--rank 8: is an option of adapters; give --finetune lora"),
    (["--finetune", "full", "--base", "int4"], "--base int4: is an option of adapters"),
    (["--finetune", "lora", "--rank", "0"], "rank"),
    (["--finetune", "lora", "--base", "int3"], "int3"),
    (["--finetune", "lora", "--targets", "nothing"], "nothing"),
    (["--finetune", "half"], "--finetune half: must be one of lora, full"),
    (
        ["--finetune", "lora", "--filled", "0"],
        "--filled 0.0: must be a number above 0 and at most 1",
    ),
    (
        ["--finetune", "lora", "--serve", "--batch", "1", "--context", "9"],
        "is an option of training",
    ),
]


@pytest.mark.parametrize(("words", "said"), WRONG, ids=[" ".join(w) for w, _ in WRONG])
def test_a_mistake_is_one_line(words, said, capsys):
    assert front.main(["plan", "qwen3-30b", "--cluster", "h100x8", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and said in printed.err and printed.err.count("\n") == 1


def test_a_model_that_cannot_be_trained_here_is_refused(tmp_path):
    other = {name: value for name, value in HUB.items() if name != "model_type"}
    (tmp_path / "config.json").write_text(json.dumps(other | {"model_type": "another"}))
    with pytest.raises(em.ConfigError, match="cannot be fine-tuned here"):
        em.plan(tmp_path, cluster="h100x8", finetune="lora")
