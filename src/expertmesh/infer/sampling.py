"""From logits to the next token: greedy, temperature, top-k, top-p."""

from dataclasses import dataclass
from numbers import Integral, Real

import torch
from torch import Tensor

from expertmesh.errors import ConfigError

# Logits over less than this leave FP32; what is left is the most likely token.
_COLDEST = 1e-6


def is_number(value: object, kind: type) -> bool:
    """Whether a value is a whole number (`kind` is int), or any (float); true and false are none. NumPy's count."""
    abstract = Integral if kind is int else Real
    return isinstance(value, abstract) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        greedy: take the most likely token (the smallest id on a tie); the other options then have no effect.
        temperature: logits are divided by this; 0 is greedy.
        top_k: only the k most likely tokens stay; None: all.
        top_p: of those, the fewest most likely tokens whose probabilities sum to at least p stay (nucleus sampling,
            Holtzman et al. 2020); in (0, 1]; None: all.
        seed: the seed of the random numbers.

    Raises:
        ConfigError: a value breaks its rule.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Checks the values."""
        for name, kind in (("temperature", float), ("top_k", int), ("top_p", float), ("seed", int)):
            value = getattr(self, name)
            if not is_number(value, kind) and (value is not None or not name.startswith("top")):
                what = "a whole number" if kind is int else "a number"
                raise ConfigError(name, repr(value), f"must be {what}", "give one")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                "temperature",
                self.temperature,
                "must be at least 0",
                "use 0 for the most likely token",
            )
        if self.temperature < _COLDEST:
            object.__setattr__(self, "greedy", True)
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                "top_k", self.top_k, "must be at least 1", "leave it out to keep all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                "top_p",
                self.top_p,
                "must be above 0 and at most 1",
                "leave it out to keep all tokens",
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed={self.seed}: must be from 0 to 2^63 - 1; choose another seed")


def next_token_probs(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """The distribution that the next token is drawn from.

    Args:
        logits_BV: (B, V), any float dtype.
        sampling: temperature, top-k and top-p, applied in this order; `greedy` is not looked at.

    Returns:
        (B, V) FP64 probabilities. Where tokens tie at the edge of top-k or top-p, those with smaller ids stay.
    """
    # The largest becomes 0 first, so that no temperature, however small, makes an infinity of it.
    logits_BV = logits_BV.double()
    scaled = (logits_BV - logits_BV.amax(-1, keepdim=True)) / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return scaled.softmax(-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    if sampling.top_k is not None:
        ordered[:, sampling.top_k :] = -torch.inf
    probs = ordered.softmax(-1)
    if sampling.top_p is not None:
        before = probs.cumsum(-1) - probs
        probs = probs.masked_fill(before >= sampling.top_p, 0.0)
        # Rounding must not remove the most likely token, whose sum before it is 0 <= top_p.
        probs = probs / probs.sum(-1, keepdim=True)
    return torch.zeros_like(probs).scatter(-1, order, probs)


def choose(logits_BV: Tensor, sampling: Sampling, *, uniform_B: Tensor | None = None) -> Tensor:
    """The next token of every sequence.

    Args:
        logits_BV: (B, V), any float dtype.
        sampling: how to choose.
        uniform_B: (B,) FP64 numbers in [0, 1), one per sequence; needed unless greedy. The token is the one whose
            interval of the cumulative distribution holds the number, so it depends on nothing else.

    Returns:
        (B,) int64 token ids, on the device of the logits.
    """
    if sampling.greedy:
        return logits_BV.argmax(-1)
    assert uniform_B is not None
    cumulative = next_token_probs(logits_BV, sampling).cumsum(-1)
    # Scaled by the last value, because rounding may leave that a little below 1.
    threshold = uniform_B.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0]


def sequence_generators(seed: int, batch_size: int) -> list[torch.Generator]:
    """One CPU generator per sequence, so that a sequence's numbers do not depend on how many others there are."""
    return [torch.Generator().manual_seed((seed + index) % 2**63) for index in range(batch_size)]


def draw_uniform(generators: list[torch.Generator]) -> Tensor:
    """(B,) FP64 numbers in [0, 1), one from each generator."""
    draws = [torch.rand((), generator=g, dtype=torch.float64) for g in generators]
    return torch.stack(draws)
