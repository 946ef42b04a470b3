"""Counter-based random numbers for routing, by Philox4x32-10.

Noise is a pure function of (seed, step, layer, stream, token index, column): the same on any number of ranks, in
eager mode and under torch.compile, and when activation checkpointing recomputes a layer. The layout of the counter
is in docs/decisions/001-token-index.md.
"""

import math

import torch
from torch import Tensor, nn

from expertmesh.ops.philox import philox4x32

_MASK32 = 0xFFFFFFFF
_MASK16 = 0xFFFF

STREAM_ROUTER_NOISE = 0
STREAM_INPUT_JITTER = 1
STREAM_INPUT_DROPOUT = 2
STREAM_RANDOM_DROP = 3
STREAM_HASH = 4
STREAM_OUTPUT_MASK = 5


def random_bits(noise_key: Tensor, token_index_T: Tensor, num_columns: int, *, layer_index: int, stream: int) -> Tensor:
    """Uniform 32-bit integers for each (token, column).

    Args:
        noise_key: (2,) int64, (seed, step), on the device of the result.
        token_index_T: (T,) int64 global token indices, below 2^48.
        num_columns: numbers per token, at most 2^18.
        layer_index: the number of the layer, below 2^24.

    Returns:
        (T, num_columns) int64 in [0, 2^32). Does not synchronise.
    """
    seed, step = noise_key.unbind(0)
    num_blocks = -(-num_columns // 4)
    block = torch.arange(num_blocks, device=token_index_T.device)
    index = token_index_T[:, None]
    c1 = (((index >> 32) & _MASK16) << 16) | block
    c3 = torch.full_like(step, ((layer_index & 0xFFFFFF) << 8) | stream)
    words: Tensor = philox4x32(index & _MASK32, c1, step & _MASK32, c3, seed & _MASK32, (seed >> 32) & _MASK32)
    return words.flatten(-2)[:, :num_columns]


def uniform(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """32 random bits -> a number in the open interval (0, 1), the middle of one of 2^23 cells.

    Adding the half uses the 24th bit of FP32: with 24 random bits the largest number would round to 1, and its Gumbel
    number would be infinite.
    """
    return ((bits >> 9).to(dtype) + 0.5) * 2.0**-23


def gumbel(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """32 random bits -> a standard Gumbel number, -log(-log(u))."""
    return -(-uniform(bits, dtype).log()).log()


def gaussian(bits: Tensor, more_bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Two times 32 random bits -> a standard normal number (Box-Muller)."""
    radius = (-2.0 * uniform(bits, dtype).log()).sqrt()
    return radius * (2.0 * math.pi * uniform(more_bits, dtype)).cos()


def fresh_key(device: torch.device) -> Tensor:
    """A (2,) int64 key from torch's default generator of this device.

    Activation checkpointing restores that generator before it recomputes, so the recomputed key is the same.
    """
    return torch.randint(0, 2**62, (2,), dtype=torch.int64, device=device)


def key_noise(module: nn.Module, *, seed: int, step: int) -> None:
    """Set the (seed, step) key of the router noise and random dropping of every MoE layer inside.

    Call it before each optimizer step. A layer that was never keyed draws a fresh key from torch's default
    generator in each training forward. The key is a tensor, so a new step does not recompile. Does not synchronise.
    """
    for layer in module.modules():
        key = getattr(layer, "noise_key", None)
        if isinstance(key, Tensor):
            key[0].fill_(seed)
            key[1].fill_(step)
            layer.noise_is_keyed = True  # type: ignore[assignment]


def count_tokens_from(module: nn.Module, *, first: int, count: int) -> None:
    """Set the samples that the next calls hold, for MoE layers that get no token_index.

    Micro-batches and ranks then draw different noise. It is the noise of one call with the whole batch if all samples
    have equally many tokens. Does not synchronise.

    Args:
        count: samples of each call; their tokens are in sample order.
    """
    for layer in module.modules():
        samples = getattr(layer, "noise_samples", None)
        if isinstance(samples, Tensor):
            samples[0].fill_(first)
            samples[1].fill_(count)


def first_index(num_tokens: int, samples: Tensor) -> Tensor:
    """Index in the whole batch of a call's first token, int64 scalar, if all samples have equally many tokens.

    Args:
        samples: (2,) int64, (first, count) of `count_tokens_from`; zeros if it was not called.
    """
    first, count = samples.unbind(0)
    return first * num_tokens // count.clamp(min=1)
