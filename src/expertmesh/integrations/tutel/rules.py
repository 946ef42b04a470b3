"""Rules of Tutel's numbers, by the name of the argument."""

from typing import Any

from torch import Tensor

from expertmesh.config.values import REAL, WHOLE, Number, check_type
from expertmesh.errors import ConfigError

_COUNT = Number(1, types=WHOLE, fix="give 1 or more")
RULES = {
    "model_dim": _COUNT,
    "k": _COUNT,
    "top_k": Number(0, types=WHOLE, fix="leave it out for the gate's"),
    "hidden_size_per_expert": _COUNT,
    "output_dim": Number(1, types=WHOLE, fix="leave it out for model_dim", optional=True),
    "proj_dim": _COUNT,
    "init_t": Number(0, is_open=True, fix="for example 0.5"),
    "capacity_factor": Number(-1e9, 1e9, fix="give 1.0 for the even share, or 0 for dropless"),
    "gate_noise": Number(0, fix="give 0 for none"),
    "a2a_ffn_overlap_degree": Number(1, types=WHOLE, fix="give 1 for one part"),
    "megablocks_size": Number(0, types=WHOLE, fix="leave it out"),
    "reserve_dims": _COUNT,
}


def check_numbers(**given: Any) -> None:
    """Raise ConfigError for a number that breaks the rule of its name; other names and None are left alone."""
    for name, value in given.items():
        if name in RULES and value is not None:
            RULES[name].check(name, value)


def check_count(count: Any) -> int:
    """Experts per device; negative: devices per expert. 1 / n means -n."""
    Number(-1e9, 1e9, types=REAL, fix="use 1").check("num_experts_per_device", count)
    whole = -round(1 / count) if 0 < count < 1 else int(count)
    if whole == 0:
        raise ConfigError("num_experts_per_device=0: must be positive, or negative; use 1")
    if whole != count and abs(-1 / whole - count) > 1e-2:
        raise ConfigError(
            f"num_experts_per_device={count}: must be a whole number, or 1 / n for n devices of one expert; use 1"
        )
    return 1 if whole == -1 else whole


def check_tokens(x: Any, token: int, reserve_dims: int) -> None:
    """Raise ConfigError unless the input is a tensor of floating-point tokens of `token` numbers each."""
    check_type("input", x, Tensor, "a tensor")
    if x.dim() <= reserve_dims or x.shape[-reserve_dims:].numel() != token:
        raise ConfigError(
            f"input of shape {tuple(x.shape)}, reserve_dims={reserve_dims}: must be (tokens, ...) with {token} numbers "
            f"in the last {reserve_dims} dimensions; reshape it"
        )
    if not x.is_floating_point():
        raise ConfigError(f"input of {x.dtype}: must be of a floating-point type; convert it")
