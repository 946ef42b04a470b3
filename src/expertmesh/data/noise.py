"""Noise for denoising: masked spans of tokens and permuted sentences (BART, Lewis et al. 2020, 2.2)."""

import hashlib
import math

import numpy as np

ENDS_OF_SENTENCES = (".", "!", "?", "。", "！", "？")


class Draws:
    """Uniform random numbers that depend on seed and place only, in every version of NumPy."""

    def __init__(self, seed: int, *place: object) -> None:
        digest = hashlib.blake2b(repr((seed, *place)).encode(), digest_size=16).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest, "little"))

    def uniform(self, count: int) -> np.ndarray:
        """(count,) FP64, the next numbers in [0, 1)."""
        return (self._philox.random_raw(count) >> 11) * 2.0**-53

    def order(self, count: int) -> np.ndarray:
        """0 ... count - 1 in a random order."""
        return np.argsort(self._philox.random_raw(count), kind="stable")


def poisson(uniform: float, mean: float) -> int:
    """The Poisson number whose cumulative probability first passes `uniform`."""
    number, term = 0, math.exp(-mean)
    reached = term
    while reached <= uniform and term > 0.0:
        number += 1
        term *= mean / number
        reached += term
    return number


def add_noise(
    tokens_N: np.ndarray,  # (N,) the text, not empty
    draws: Draws,  # random numbers
    *,
    fraction: float,  # share of the tokens to mask, in (0, 1); one token stays in any case
    mean_span: float,  # mean length of a span
    mask_id: int,  # id of the mask token
    sentence_ends: np.ndarray | None = None,
) -> np.ndarray:
    """A noised copy of a text.

    First the sentences are permuted, then spans are masked until `fraction` of the tokens is gone. A span starts at a
    token drawn uniformly, and its length is drawn from a Poisson distribution (at least 1; it ends before the text's
    end and before an earlier span). One mask replaces the whole span.

    Args:
        sentence_ends: (V,) bool, True for tokens that end a sentence; None: sentences are not permuted.
    """
    if sentence_ends is not None:
        cuts = np.flatnonzero(sentence_ends[tokens_N[:-1]]) + 1
        sentences = np.split(tokens_N, cuts)
        tokens_N = np.concatenate([sentences[i] for i in draws.order(len(sentences))])
    wanted = min(round(fraction * len(tokens_N)), len(tokens_N) - 1)
    is_masked, is_start = np.zeros((2, len(tokens_N)), dtype=bool)
    while (left := wanted - int(is_masked.sum())) > 0:
        first, second = draws.uniform(2)
        free = np.flatnonzero(~is_masked)
        start = int(free[int(first * len(free))])
        length = min(max(poisson(second, mean_span), 1), left)
        taken = np.flatnonzero(is_masked[start : start + length])
        is_masked[start : start + (int(taken[0]) if len(taken) else length)] = True
        is_start[start] = True
    found = np.where(is_start, mask_id, tokens_N)
    result: np.ndarray = found[~is_masked | is_start]
    return result
