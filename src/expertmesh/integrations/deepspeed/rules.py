"""Rules of the arguments of DeepSpeed's layer and gates, by name."""

from typing import Any

from torch import Tensor, nn

from expertmesh.config.values import WHOLE, Number, check_choice, check_type
from expertmesh.errors import ConfigError

_COUNT = Number(1, types=WHOLE, fix="give 1 or more")
_FACTOR = Number(0, 1e9, fix="give 1.0 for the even share")
RULES = {
    "k": _COUNT,
    "num_experts": _COUNT,
    "ep_size": _COUNT,
    "hidden_size": _COUNT,
    "model_dim": _COUNT,
    "capacity_factor": _FACTOR,
    "eval_capacity_factor": _FACTOR,
    "min_capacity": Number(0, types=WHOLE, fix="give 0 for none"),
}
POLICIES = (None, "None", "Jitter", "RSample")
"""Values of noisy_gate_policy."""


def check_arguments(**given: Any) -> None:
    """Raise ConfigError for an argument that breaks the rule of its name; of other names, for one that is not a
    bool."""
    for name, value in given.items():
        if name in RULES:
            RULES[name].check(name, value)
        elif name == "noisy_gate_policy":
            if not any(value is known or value == known for known in POLICIES):
                raise ConfigError(f"{name}={value!r}: must be None, 'Jitter' or 'RSample'; choose one")
        elif name == "expert":
            check_type(name, value, nn.Module, "a torch.nn.Module", "give one, not its class")
        else:
            check_choice(name, value, (True, False))


def check_logits(logits: Any, k: int, used_token: Any = None) -> None:
    """Raise ConfigError unless logits are (tokens, experts) of at least k experts, with a number per token if any."""
    check_type("logits", logits, Tensor, "a tensor")
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ConfigError(
            f"logits of shape {tuple(logits.shape)}, {logits.dtype}: must be (tokens, experts) of a floating-point "
            "type; reshape or convert them"
        )
    Number(1, logits.shape[1], "choose fewer", types=WHOLE, limit="num_experts").check("k", k)
    check_used(used_token, len(logits))


def check_used(used_token: Any, num_tokens: int) -> None:
    """Raise ConfigError unless used_token is None or a tensor of a number per token."""
    check_type("used_token", used_token, (Tensor, type(None)), "a tensor")
    if used_token is not None and used_token.numel() != num_tokens:
        raise ConfigError(f"used_token has {used_token.numel()} entries for {num_tokens} tokens; give one each")
