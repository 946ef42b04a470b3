"""What is compared: for each claim a few arms, which are the one small GPT with some options changed.

Shapes are chosen for a CPU core: 0.15 to 0.3 million active parameters, so that 100 tokens for each of them are minutes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from expertmesh.config.moe import MoEConfig
from expertmesh.config.run import RunConfig
from expertmesh.models.gpt.config import GPTRunConfig, ModelConfig
from expertmesh.models.gpt.recipes import RECIPES
from expertmesh.models.gpt.recipes import dense_twin

SMALL = {
    "model.vocab_size": 512,
    "model.max_seq_len": 256,
    "model.dim": 64,
    "model.num_layers": 3,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.ffn_hidden_dim": 128,
    "model.moe.hidden_dim": 64,
    "data.seq_len": 256,
    "optim.name": "adamw",
    "optim.schedule": "wsd",
    "optim.min_lr_ratio": 0.0,
    "optim.warmup_steps": 100,
    "train.batch_size": 32,
    "train.tensorboard": False,
}
"""Of all arms, over the recipe gpt-moe-demo."""

_MULTIPLE = 16


def wider(config: ModelConfig, times: float) -> ModelConfig:
    """The same model, all widths times a number."""
    moe = config.moe
    if moe.num_experts:
        moe = moe.model_copy(update={"hidden_dim": round(moe.hidden_dim * times)})
    changed = {
        "dim": round(config.dim * times),
        "num_heads": round(config.num_heads * times),
        "ffn_hidden_dim": round(config.ffn_hidden_dim * times),
        "vocab_size": config.vocab_size * max(int(times), 1) if times > 3 else config.vocab_size,
        "moe": moe,
    }
    return config.model_copy(update=changed)


def dense_of(config: ModelConfig) -> ModelConfig:
    """The dense model of as many operations per token: layers, residual MLPs and routers count."""
    moe, widths = config.moe, 0.0
    for experts in config.experts_per_layer():
        widths += moe.top_k * moe.hidden_dim + experts / 3 if experts else config.ffn_hidden_dim
        widths += config.ffn_hidden_dim if experts and moe.residual else 0
    hidden = math.ceil(widths / config.num_layers / _MULTIPLE) * _MULTIPLE
    return config.model_copy(update={"ffn_hidden_dim": hidden, "moe": MoEConfig(num_experts=())})


@dataclass(frozen=True)
class Arm:
    """One of the models that are compared.

    Attributes:
        name: in tables.
        changes: to the small model, by dotted name.
        is_dense: the dense twin of what the changes say.
        dense_width: the dense model of as many operations as what the changes say, its widths times this number.
        lr: peak rate that the sweep begins with.
        teacher: arm whose finished run of the same seed teaches this one.
        until: share of the steps in which it does.
        longer: its tokens over those of the others.
        rate_of: arm whose swept rate it has, too; None: its own is swept.
    """

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    is_dense: bool = False
    dense_width: float | None = None
    lr: float = 4e-3
    teacher: str | None = None
    until: float = 1.0
    longer: float = 1.0
    rate_of: str | None = None

    def configuration(self, changes: Mapping[str, Any] | None = None) -> RunConfig:
        """The arm's run with a few more changes; seed, steps and folder are to come."""
        values = {**SMALL, "optim.lr": self.lr, **self.changes, **(changes or {})}
        config = RECIPES["gpt-moe-demo"]().updated(values)
        if self.dense_width is not None:
            assert isinstance(config, GPTRunConfig)
            model = wider(dense_of(config.model), self.dense_width)
            return config.model_copy(update={"model": model})
        return dense_twin(config) if self.is_dense else config


@dataclass(frozen=True)
class Claim:
    """A claim and how it is tested.

    Attributes:
        name: of the command, and of the files of results.
        title: of the page.
        question: that the runs answer.
        arms: what is compared; the first is the one that the claim is about.
        base: arm whose active parameters decide how many tokens all arms see.
        tokens_per_parameter: of the longest run, per active parameter of that arm.
        steps: of the longest run, in place of these two.
        parts: finished budgets, in twentieths of the longest, of the arms that have several.
        ladder: arms that have these budgets; the others have the longest.
        single: arms that run with one seed only.
        sweeps: whether each arm's rate is swept at a quarter of the budget; otherwise it is the arm's.
        text: that all learn from, where no other is given.
    """

    name: str
    title: str
    question: str
    arms: tuple[Arm, ...]
    base: str = ""
    tokens_per_parameter: float = 0.0
    steps: int | None = None
    parts: tuple[int, ...] = (20,)
    ladder: tuple[str, ...] = ()
    single: tuple[str, ...] = ()
    sweeps: bool = True
    text: str = "Python's standard library, split by file"

    def arm(self, name: str) -> Arm:
        """The arm of that name."""
        return next(arm for arm in self.arms if arm.name == name)


_MANY = {"model.moe.num_experts": (64,), "model.moe.top_k": 2, "model.moe.weight_scale": 2.0}
_MUON = {"optim.name": "muon"}
_PYRAMID = {
    "model.num_layers": 4,
    "model.moe.top_k": 1,
    "model.moe.weight_scale": 1.0,
    "model.moe.hidden_dim": 128,
}
_RESIDUAL = _PYRAMID | {"model.moe.num_experts": (16, 16, 16, 32), "model.moe.residual": True}
_TEACHER = _RESIDUAL | _MUON | {"model.num_layers": 8, "model.moe_every": 2}
_STUDENT = _TEACHER | {"model.num_layers": 7, "model.moe.num_experts": (16, 16, 32)}


def _wider(times: int, dim: int) -> Arm:
    shape = {"model.dim": dim, "model.num_heads": dim // 32, "model.moe.hidden_dim": dim}
    return Arm(f"dense, {times} x", _MANY | shape, is_dense=True, lr=3e-3)


def _dense_ladder(changes: Mapping[str, Any], lr: float) -> tuple[Arm, ...]:
    """Dense models of the operations of a mixture and of about twice as many."""
    return (
        Arm("dense, 1 x", changes, dense_width=1.0, lr=lr, rate_of="dense, 2 x"),
        Arm("dense, 2 x", changes, dense_width=1.5, lr=lr),
    )


CLAIMS = {
    claim.name: claim
    for claim in (
        Claim(
            name="moe",
            title="Mixture of experts against dense: tokens and width for one loss",
            question="At how many times fewer tokens does a mixture of experts reach the loss of a dense model of the same "
            "operations per token, and how wide a dense model is as good after the same tokens?",
            arms=(
                Arm("MoE", _MANY),
                Arm("dense", _MANY, is_dense=True),
                _wider(2, 96),
                _wider(4, 128),
                _wider(8, 192),
            ),
            base="dense",
            tokens_per_parameter=100,
            parts=(20, 14, 10, 7, 5, 4),
            ladder=("MoE", "dense"),
            single=("dense, 4 x", "dense, 8 x"),
        ),
        Claim(
            name="moe-muon",
            title="Mixture of experts against dense, both trained with Muon",
            question="At how many times fewer tokens does a mixture of experts reach the loss of a dense model of the same "
            "operations per token, where Muon trains both, the experts' matrices one by one?",
            arms=(
                Arm("MoE", _MANY | _MUON, lr=12e-3),
                Arm("dense", _MANY | _MUON, is_dense=True, lr=12e-3),
            ),
            base="dense",
            tokens_per_parameter=100,
            parts=(20, 10, 7, 5, 4),
            ladder=("MoE", "dense"),
        ),
        Claim(
            name="prmoe",
            title="Pyramid-residual MoE against more experts everywhere",
            question="Is a pyramid of 16, 16, 16 and 32 experts beside a dense MLP at most 0.02 nats worse than 64 "
            "experts in all four layers, and how does it compare with two experts per token?",
            arms=(
                Arm("PR-MoE-16/32", _RESIDUAL),
                Arm("MoE-64", _PYRAMID | {"model.moe.num_experts": (64,)}),
                Arm(
                    "MoE-16, top-2",
                    _PYRAMID
                    | {
                        "model.moe.num_experts": (16,),
                        "model.moe.top_k": 2,
                        "model.moe.weight_scale": 2.0,
                    },
                ),
                Arm("MoE-16", _PYRAMID | {"model.moe.num_experts": (16,)}),
                *_dense_ladder(_RESIDUAL, lr=4e-3),
                Arm("dense, 4 x", _RESIDUAL, dense_width=2.0, lr=4e-3, rate_of="dense, 2 x"),
            ),
            base="MoE-16",
            tokens_per_parameter=50,
        ),
        Claim(
            name="mos",
            title="Mixture-of-Students: seven layers with and without a teacher of eight",
            question="Is a student of 7 layers that its teacher of 8 teaches for 70 % of the steps within 0.02 nats of it, "
            "and 0.02 nats better than the same model without a teacher?",
            arms=(
                Arm(
                    "student, taught until 0.7",
                    _STUDENT,
                    lr=6e-3,
                    teacher="teacher",
                    until=0.7,
                    rate_of="student alone",
                ),
                Arm(
                    "student, taught to the end",
                    _STUDENT,
                    lr=6e-3,
                    teacher="teacher",
                    rate_of="student alone",
                ),
                Arm("student alone", _STUDENT, lr=6e-3),
                Arm(
                    "student alone, equal compute",
                    _STUDENT,
                    lr=6e-3,
                    longer=1.25,
                    rate_of="student alone",
                ),
                Arm("teacher", _TEACHER, lr=6e-3, rate_of="student alone"),
                *_dense_ladder(_STUDENT, lr=48e-3),
            ),
            base="student alone",
            tokens_per_parameter=13,
        ),
        Claim(
            name="rts",
            title="Random token selection against first come, first served",
            question="At a capacity of 1.0, does an expert that keeps random tokens learn more than one that keeps the first?",
            arms=tuple(
                Arm(
                    name,
                    _MANY
                    | {
                        "model.moe.num_experts": (16,),
                        "model.moe.top_k": 1,
                        "model.moe.weight_scale": 1.0,
                        "model.moe.hidden_dim": 128,
                        "model.moe.capacity_factor": 1.0,
                        "model.moe.drop_policy": policy,
                    },
                )
                for name, policy in (("random", "random"), ("first come", "first"))
            ),
            base="random",
            tokens_per_parameter=50,
            sweeps=False,
        ),
    )
}
