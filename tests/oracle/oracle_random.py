"""NumPy: Philox4x32-10 in 64-bit integers and the layer's noise from it, from the published algorithm."""

import numpy as np

Array = np.ndarray


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words from a counter and a key."""
    c, k = list(counter), list(key)
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [
            (second >> 32) ^ c[1] ^ k[0],
            second & 0xFFFFFFFF,
            (first >> 32) ^ c[3] ^ k[1],
            first & 0xFFFFFFFF,
        ]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def token_words(
    *, seed: int, step: int, layer_index: int, stream: int, token_index_T: Array, num_columns: int
) -> Array:
    """(T, num_columns) 32-bit words: counter = (index, index >> 32 and block, step, layer and stream), key = seed."""
    words = np.zeros((len(token_index_T), -(-num_columns // 4) * 4), dtype=np.uint64)
    for t, index in enumerate(int(i) for i in token_index_T):
        for block in range(words.shape[1] // 4):
            counter = (
                index & 0xFFFFFFFF,
                (((index >> 32) & 0xFFFF) << 16) | block,
                step & 0xFFFFFFFF,
                ((layer_index & 0xFFFFFF) << 8) | stream,
            )
            words[t, 4 * block : 4 * block + 4] = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    return words[:, :num_columns]


def uniform(words: Array) -> Array:
    """The middle of one of 2^23 equal cells of (0, 1), by the upper 23 bits: exact in FP32, never 0 or 1."""
    return ((words >> np.uint64(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel(words: Array) -> Array:
    """Standard Gumbel numbers."""
    return -np.log(-np.log(uniform(words)))


def gaussian(words: Array, more_words: Array) -> Array:
    """Standard normal numbers by Box-Muller."""
    return np.sqrt(-2.0 * np.log(uniform(words))) * np.cos(2.0 * np.pi * uniform(more_words))
