"""Sizes and memory of decode steps that are captured as graphs on a GPU; imports no torch."""

from itertools import takewhile

MOST_CAPTURED = 512
"""Largest number of tokens of a step that is captured."""
_EVERY = 8
TABLE_WIDTHS = tuple(16 * 4**n for n in range(24))
"""Numbers of blocks, to the next of which block tables of repeated steps are padded."""
LOGIT_BYTES = 60
"""Bytes of a logit while a token is drawn from sorted probabilities: seven tensors in FP64 or int64, and the logit
itself."""
PARTS_BYTES = 1 << 26
"""Bytes of attention's partial results, at most."""
GRAPH_BYTES = 1 << 16
"""Bytes of a layer in the device's copy of a graph, a guess: some tens of kernels with their arguments."""
NUM_KINDS = 3
"""Kinds of sampling, each captured on its own: greedy, by temperature, with filters."""


def captured_sizes(most: int) -> tuple[int, ...]:
    """Numbers of tokens of captured steps, to the next of which a step is padded: 1, 2, 4, multiples of 8, and the
    largest.

    Example:
        >>> captured_sizes(20)
        (1, 2, 4, 8, 16, 20)
    """
    most = min(most, MOST_CAPTURED)
    found = {1, 2, 4, *range(_EVERY, most + 1, _EVERY), most}
    return tuple(sorted(size for size in found if size <= most))


def captured_widths(most: int) -> tuple[int, ...]:
    """Widths of the block tables of captured steps: the smaller of `TABLE_WIDTHS`, and the largest."""
    return (*takewhile(lambda width: width < most, TABLE_WIDTHS), most)


def captured_bytes(most: int, *, num_layers: int, vocab_size: int, num_blocks: int, num_kinds: int = NUM_KINDS) -> int:
    """Bytes of a device's memory that captured steps take: the pool that all graphs share, which is logits above all,
    and the graphs."""
    sizes, widths = captured_sizes(most), captured_widths(num_blocks)
    num_graphs = len(sizes) * len(widths) * num_kinds
    return sizes[-1] * vocab_size * LOGIT_BYTES + PARTS_BYTES + num_graphs * num_layers * GRAPH_BYTES
