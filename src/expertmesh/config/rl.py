"""Options of reinforcement learning: rollouts, advantages, the policy's loss, and reward functions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.config.fields import Spelling
from expertmesh.errors import named


class RLConfig(Config):
    """Rollouts and policy loss; the options select GRPO, Dr. GRPO, DAPO, GSPO, CISPO or RLOO."""

    group: int = Field(default=8, ge=2, le=1024)
    """Group size: number of answers per prompt."""
    max_tokens: int = Field(default=256, gt=0)
    """Maximum number of tokens to generate per answer."""
    updates: int = Field(default=1, gt=0)
    """Number of optimizer steps per batch of rollouts, each on an equal share of its prompts."""
    advantage: Literal["group", "loo"] = "group"
    """Baseline of the advantage: the group's mean reward (group), or the mean of the group's other answers (loo,
    RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Normalization of advantages by the standard deviation of rewards in the group or in the batch; none: not
    normalized (Dr. GRPO)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio: per token, or per sequence as the geometric mean of its tokens' ratios (GSPO)."""
    loss: Literal["clip", "cispo", "reinforce"] = "clip"
    """Policy loss: PPO's clipped surrogate (clip), log-probability times the capped ratio (cispo), or without a ratio
    (reinforce)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip epsilon of the importance ratio."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip epsilon of the importance ratio."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of ratios for negative advantages (dual-clip PPO); none: no bound."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Upper bound of ratios, with loss cispo."""
    average: Literal["token", "sequence", "constant"] = "token"
    """Loss aggregation: mean over all tokens (token), mean over answers of each answer's mean (sequence), or sum
    divided by answers x max_tokens (constant, Dr. GRPO)."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Coefficient of the KL penalty to the initial model; 0: no reference model."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Coefficient of the entropy bonus."""
    mask_cut: bool = False
    """Whether answers truncated at max_tokens are masked out of the loss."""
    soft_length: int | None = Field(default=None, gt=0)
    """Number of tokens before max_tokens over which DAPO's soft overlong penalty rises from 0 to 1; none: no
    penalty."""
    exact: bool = True
    """Whether rollouts and training have bitwise equal logprobs, which every step checks; needs batch-invariant
    arithmetic."""
    replay_routing: bool = True
    """Whether training replays the experts that rollouts chose, with rl.exact=false."""
    correction: Literal["none", "token_truncate", "sequence_mask"] = "none"
    """Correction of the mismatch between rollouts and training, with rl.exact=false: truncated importance weights per
    token (token_truncate), or a mask of whole answers (sequence_mask)."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Bound C of the correction: weights are at most C (token_truncate), or answers with a ratio outside 1/C ... C are
    masked (sequence_mask)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, (owner, wanted) in _OF.items():
            if getattr(self, owner) not in wanted:
                shown = " or ".join(str(named(f"rl.{owner}", one)) for one in wanted)
                self.refuse_idle(name, f"has no effect without {shown}", "leave one of them out")
        self.require(
            self.soft_length is None or self.soft_length <= self.max_tokens,
            "soft_length",
            f"must be at most {named('rl.max_tokens')}, {self.max_tokens}",
            "lower it",
        )
        return self


_OF = {
    "clip_low": ("loss", ("clip",)),
    "clip_high": ("loss", ("clip",)),
    "dual_clip": ("loss", ("clip",)),
    "cispo_cap": ("loss", ("cispo",)),
    "ratio": ("loss", ("clip", "cispo")),
    "replay_routing": ("exact", (False,)),
    "correction": ("exact", (False,)),
    "correction_cap": ("correction", ("token_truncate", "sequence_mask")),
}
"""Options that only some values of another one read, with these values."""


class RewardConfig(Config):
    """Reward functions of reinforcement learning."""

    functions: Annotated[tuple[str, ...], Spelling("FILE:NAME")] = ()
    """Reward functions with TRL's signature, as FILE.py:NAME or package.module:NAME, or the built-in exact or number;
    with a weight: FILE.py:NAME:0.5."""
    timeout: float = Field(default=60.0, gt=0)
    """Timeout in seconds of each call of a reward function."""


def check_rl(run: Any) -> None:
    """Refuse options of reinforcement learning that do not fit a run of a GPT."""
    name = named("objective.name", "grpo")
    if run.objective.name != "grpo":
        for section in ("rl", "reward"):
            part = getattr(run, section)
            for option in type(part).model_fields:
                try:
                    part.refuse_idle(option, f"has no effect without {name}", "leave one of them out")
                except FieldError as error:
                    raise error.inside((section,)) from None
        return
    rules = (
        (
            run.train.init_from is not None,
            "train.init_from",
            f"must be a trained model with {name}, which learns from its own answers",
            "name its folder in the place of the recipe",
        ),
        (
            bool(run.reward.functions),
            "reward.functions",
            f"must be given with {name}",
            "name one: FILE.py:NAME, package.module:NAME, exact or number",
        ),
        (
            run.train.batch_size % run.rl.updates == 0,
            "rl.updates",
            f"must divide {named('train.batch_size')}, {run.train.batch_size}",
            "choose a divisor",
        ),
        (not run.data.pack, "data.pack", f"has no effect with {name}", "leave it out"),
        (
            not (run.rl.kl_beta and run.adapter.learn_routers),
            "rl.kl_beta",
            (
                f"has the model without its adapters as reference, and {named('adapter.learn_routers', True)} moves "
                "its routers"
            ),
            "leave one of them out",
        ),
        (
            not (run.rl.kl_beta and run.adapter.init_from),
            "rl.kl_beta",
            f"has the model without its adapters as reference, and {named('adapter.init_from')} begins with some",
            "merge them first (expertmesh convert), and begin with that folder and new adapters",
        ),
        (
            not run.data.document_mask,
            "data.document_mask",
            f"has no effect with {name}",
            "leave it out",
        ),
    )
    for holds, option, rule, fix in rules:
        run.require(holds, option, rule, fix)


def options_of_rl(run: Any) -> dict[str, Any]:
    """Options that reinforcement learning gives to a run whose model is known: its arithmetic, and no balance loss."""
    if run.objective.name != "grpo":
        return {}
    found: dict[str, Any] = {"model.batch_invariant": run.rl.exact}
    if run.model.moe.num_experts:
        found |= {"model.moe.aux_loss_weight": 0.0, "model.moe.z_loss_weight": 0.0}
    return found
