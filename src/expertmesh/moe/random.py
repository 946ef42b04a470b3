"""Counter-based randomness for routing."""

from torch import nn


def key_noise(module: nn.Module, *, seed: int, step: int) -> None:
    """Set the (seed, step) key of every MoE layer inside."""
