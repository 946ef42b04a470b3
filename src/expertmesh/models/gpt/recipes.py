"""Recipes of GPTs: for two CPU cores (a test, the demo, its dense twin, a PR-MoE teacher and its student), and all
others by name."""

import math
from collections.abc import Callable
from pathlib import PurePath

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import DistillConfig, OptimConfig, TrainConfig
from expertmesh.config.text import TextConfig
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.published import PUBLISHED, gpt_moe_1b
from expertmesh.models.gpt.scale import LARGE

_UNTIL = 0.7
_MULTIPLE = 16


def gpt_moe_test() -> GPTRunConfig:
    """A model that trains in seconds, for tests: 2 layers, 4 experts, 64 wide."""
    return GPTRunConfig(
        model=ModelConfig(
            vocab_size=512,
            max_seq_len=64,
            dim=64,
            num_layers=2,
            num_heads=2,
            ffn_hidden_dim=128,
            moe=MoEConfig(num_experts=(4,), top_k=2, hidden_dim=64),
        ),
        data=TextConfig(seq_len=64, max_bytes=400_000),
        optim=OptimConfig(lr=3e-3, warmup_steps=5),
        train=TrainConfig(
            steps=20,
            batch_size=8,
            run_dir="runs/gpt-moe-test",
            checkpoint_every=10,
            eval_every=10,
            eval_batches=2,
        ),
    )


def gpt_moe_demo() -> GPTRunConfig:
    """The demo: 32 small experts, top-2, trained on 2.6 million tokens of Python source.

    The feed-forward layers are narrow, so that a dense model of the same cost is short of parameters within the
    minutes of a demo, which is where experts pay (docs/log.md, "Equal learning"). weight_scale = K undoes the 1/K
    that normalised weights put on K experts, so that the layer starts with the output of its dense twin.
    """
    return GPTRunConfig(
        model=ModelConfig(
            vocab_size=2048,
            max_seq_len=128,
            dim=128,
            num_layers=4,
            num_heads=4,
            num_kv_heads=2,
            qk_norm=True,
            init_std=0.06,
            moe=MoEConfig(num_experts=(32,), top_k=2, hidden_dim=64, weight_scale=2.0),
        ),
        data=TextConfig(seq_len=128),
        optim=OptimConfig(name="muon", lr=12e-3, warmup_steps=50),
        train=TrainConfig(
            steps=640,
            batch_size=32,
            run_dir="runs/gpt-moe-demo",
            checkpoint_every=160,
            eval_every=80,
        ),
    )


def gpt_dense_demo() -> GPTRunConfig:
    """The demo's dense twin: the same model with one feed-forward layer in place of the experts."""
    twin = dense_twin(gpt_moe_demo())
    train = twin.train.model_copy(update={"run_dir": "runs/gpt-dense-demo"})
    return twin.model_copy(update={"train": train})


def gpt_prmoe_demo() -> GPTRunConfig:
    """The demo as pyramid-residual MoE: 8 layers, every other one MoE: 16, 16, 16, 32 experts, top-1 + dense MLP."""
    return _pyramid("gpt-prmoe-demo", num_layers=8, num_experts=(16, 16, 16, 32))


def gpt_mos_demo() -> GPTRunConfig:
    """The demo's Mixture-of-Students: 7 layers, distilled from runs/gpt-prmoe-demo for the first 70% of the steps."""
    config = _pyramid("gpt-mos-demo", num_layers=7, num_experts=(16, 16, 32))
    distill = DistillConfig(teacher="runs/gpt-prmoe-demo", until=_UNTIL)
    return config.model_copy(update={"distill": distill})


def _pyramid(name: str, *, num_layers: int, num_experts: tuple[int, ...]) -> GPTRunConfig:
    return gpt_moe_demo().updated(
        {
            "model.num_layers": num_layers,
            "model.moe_every": 2,
            "model.ffn_hidden_dim": 128,
            "model.moe.num_experts": num_experts,
            "model.moe.top_k": 1,
            "model.moe.hidden_dim": 128,
            "model.moe.weight_scale": 1.0,
            "model.moe.residual": True,
            "train.run_dir": f"runs/{name}",
        }
    )


def dense_twin(config: GPTRunConfig) -> GPTRunConfig:
    """Dense configuration with the same operations: one feed-forward layer in place of the experts.

    A token costs 3 * D * K * F multiplications in K experts of hidden size F, and D * E in the router. The dense layer
    has hidden size K * F + E / 3, rounded up to a multiple of 16, so that it costs as much as experts and router, or a
    little more.

    Args:
        config: the config of a model with gated experts, the same number in every layer.
    """
    moe = config.model.moe
    multiplications = 3 * moe.top_k * moe.hidden_dim + moe.num_experts[0]
    hidden_dim = math.ceil(multiplications / (3 * _MULTIPLE)) * _MULTIPLE
    model = config.model.model_copy(update={"ffn_hidden_dim": hidden_dim, "moe": MoEConfig(num_experts=())})
    return config.model_copy(update={"model": model})


def finetune(folder: str) -> GPTRunConfig:
    """Fine-tuning of the model of a folder: one epoch, AdamW at 2e-5, warm-up and cosine decay, no weight decay."""
    return GPTRunConfig(
        optim=OptimConfig(lr=2e-5, weight_decay=0.0, warmup_ratio=0.03),
        train=TrainConfig(
            epochs=1.0,
            init_from=folder,
            run_dir=f"runs/{PurePath(folder).name or 'model'}-finetuned",
        ),
    )


RECIPES: dict[str, Callable[[], GPTRunConfig]] = {
    "gpt-moe-test": gpt_moe_test,
    "gpt-moe-demo": gpt_moe_demo,
    "gpt-dense-demo": gpt_dense_demo,
    "gpt-prmoe-demo": gpt_prmoe_demo,
    "gpt-mos-demo": gpt_mos_demo,
    "gpt-moe-1b": gpt_moe_1b,
    **{recipe.name: recipe for recipe in (*PUBLISHED, *LARGE)},
}
"""The recipes by name."""
