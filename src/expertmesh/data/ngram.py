"""A byte trigram model with back-off: the baseline that a trained model must beat."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_START = b"\n\n"
_BYTES = 256


@dataclass(frozen=True)
class ByteTrigram:
    """Interpolated Witten-Bell back-off over bytes (Witten and Bell 1991, method C; Chen and Goodman 1998, eq. 16).

    With c(h) the count of a history h, t(h) the number of different bytes seen after it, and h' the history without its
    first byte:

        p(b | h) = (c(h b) + t(h) p(b | h')) / (c(h) + t(h)),    p(b | h) = p(b | h') for a history never seen,

    from trigrams down to the uniform distribution over the 256 bytes. Each document begins after two newlines.
    """

    counts3: np.ndarray  # (256, 256, 256) int64, how often byte k followed bytes i, j

    @classmethod
    def fit(cls, texts: Iterable[str]) -> "ByteTrigram":
        """Count the bytes of some documents; takes 128 MiB and about a second per 20 MB."""
        counts = np.zeros(_BYTES**3, dtype=np.int64)
        for text in _joined(texts):
            np.add(counts, np.bincount(_trigrams(text), minlength=_BYTES**3), out=counts)
        return cls(counts.reshape(_BYTES, _BYTES, _BYTES))

    def probabilities(self) -> np.ndarray:
        """(256, 256, 256) FP32: p(k | i, j)."""
        counts2, counts1 = self.counts3.sum(0), self.counts3.sum((0, 1))
        uniform = np.full(_BYTES, 1.0 / _BYTES)
        unigram = _interpolate(counts1, uniform)
        bigram = _interpolate(counts2, unigram)
        # One leading byte at a time, because FP64 for all would take 400 MB more.
        planes = [_interpolate(plane, bigram).astype(np.float32) for plane in self.counts3]
        return np.stack(planes)

    def bits_per_byte(self, texts: Iterable[str]) -> float:
        """Mean bits for each byte of some documents; NaN if there is none."""
        table = -np.log2(self.probabilities()).reshape(-1)
        bits, num_bytes = 0.0, 0
        for text in _joined(texts):
            which = _trigrams(text)
            bits += float(table[which].sum(dtype=np.float64))
            num_bytes += len(which)
        return bits / num_bytes if num_bytes else float("nan")


def _interpolate(counts: np.ndarray, lower: np.ndarray) -> np.ndarray:
    """(..., 256) counts and the shorter history's probabilities, broadcast -> (..., 256) probabilities."""
    total = counts.sum(-1, keepdims=True).astype(np.float64)
    kinds = (counts > 0).sum(-1, keepdims=True).astype(np.float64)
    seen = total > 0
    mixed = (counts + kinds * lower) / np.where(seen, total + kinds, 1.0)
    return np.where(seen, mixed, lower)


def _joined(texts: Iterable[str], num_bytes: int = 1 << 22) -> Iterable[list[bytes]]:
    """Documents in groups of about so many bytes, to call NumPy less often."""
    group: list[bytes] = []
    size = 0
    for text in texts:
        group.append(text.encode())
        size += len(group[-1])
        if size >= num_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group


def _trigrams(documents: list[bytes]) -> np.ndarray:
    """The trigram that ends at each byte of the documents, as one number below 2^24."""
    data = np.frombuffer(b"".join(_START + d for d in documents), dtype=np.uint8).astype(np.int32)
    which = (data[:-2] << 16) | (data[1:-1] << 8) | data[2:]
    # Drop those that end in the start of a document; the first start has none.
    ends = np.cumsum([len(_START) + len(d) for d in documents])[:-1]
    keep = np.ones(len(which), dtype=bool)
    keep[ends - 2] = False
    keep[ends - 1] = False
    result: np.ndarray = which[keep]
    return result
