"""Options of reinforcement learning: rollouts, advantages, the policy's loss, and reward functions."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from expertmesh.config.base import Config, FieldError
from expertmesh.config.fields import Spelling
from expertmesh.errors import named


class RLConfig(Config):
    """Rollouts and the policy's loss: GRPO, Dr. GRPO, DAPO, GSPO, CISPO and RLOO by their options."""

    group: int = Field(default=8, ge=2, le=1024)
    """Number of answers to each prompt, which are compared with one another."""
    max_tokens: int = Field(default=256, gt=0)
    """Maximum number of tokens of an answer."""
    updates: int = Field(default=1, gt=0)
    """Number of optimizer steps per step of the run, each on an equal part of its prompts."""
    advantage: Literal["group", "loo"] = "group"
    """Baseline of a reward: mean of its group (group), or mean of the group's other answers (loo, RLOO)."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of advantages: standard deviation of the group's rewards, or of all rewards of the step; none: no divisor (Dr. GRPO)."""
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio: per token, or the geometric mean over an answer (sequence, GSPO)."""
    loss: Literal["clip", "cispo", "reinforce"] = "clip"
    """Loss of a token: clipped surrogate (clip), log-probability weighted by the capped ratio (cispo), or without a ratio (reinforce)."""
    clip_low: float = Field(default=0.2, gt=0, le=1)
    """Lower clip range: ratios below 1 - clip_low give no gradient for negative advantages."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: ratios above 1 + clip_high give no gradient for positive advantages."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Upper bound of ratios for negative advantages (dual-clip PPO); none: no bound."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Upper bound of ratios, with loss cispo."""
    average: Literal["token", "sequence", "constant"] = "token"
    """Average of token losses: over the step's tokens, over answers of their means (sequence), or over answers x max_tokens (constant, Dr. GRPO)."""
    kl_beta: float = Field(default=0.0, ge=0)
    """Weight, beside the loss of a token, of the KL divergence to the model as the run begins; 0: no reference."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy in nats that is subtracted from the loss of a token."""
    mask_cut: bool = False
    """Whether answers that max_tokens cut off are not learned."""
    soft_length: int | None = Field(default=None, gt=0)
    """Number of last tokens before max_tokens over which a penalty rises from 0 to 1; none: no penalty (DAPO's soft overlong punishment)."""
    exact: bool = True
    """Whether rollouts and training compute the same bits, which is checked in every step; needs batch-invariant arithmetic."""
    replay_routing: bool = True
    """Whether training replays the experts that rollouts chose, with exact off."""
    correction: Literal["none", "token_truncate", "sequence_mask"] = "none"
    """Correction of the mismatch of rollouts and training, with exact off: importance weights of tokens, capped, or a mask of answers."""
    correction_cap: float = Field(default=2.0, gt=1)
    """Bound C of the correction: weights are at most C (token_truncate), or answers outside 1/C ... C are not learned (sequence_mask)."""

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
    """Reward functions with TRL's signature: FILE.py:NAME or package.module:NAME, or exact or number; also with a weight, FILE.py:NAME:0.5."""
    timeout: float = Field(default=60.0, gt=0)
    """Maximum seconds of a call of the reward functions."""


def check_rl(run: Any) -> None:
    """Refuse options of reinforcement learning that do not fit a run of a GPT.

    Args:
        run: its configuration.

    Raises:
        FieldError: one does not.
    """
    name = named("objective.name", "grpo")
    if run.objective.name != "grpo":
        for section in ("rl", "reward"):
            part = getattr(run, section)
            for option in type(part).model_fields:
                try:
                    part.refuse_idle(
                        option, f"has no effect without {name}", "leave one of them out"
                    )
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
            f"has the model without its adapters as reference, and {named('adapter.learn_routers', True)} moves its routers",
            "leave one of them out",
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
