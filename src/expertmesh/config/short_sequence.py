"""Lengths at which attention on a CPU changes its algorithm, shared by the code (`ops/`) and its memory (`costs/`)."""

SHORT_SEQUENCE = 256
"""Longest sequence whose probabilities attention in blocks keeps on a CPU (`ops/attention/query_blocks.py`)."""
HALVED_SEQUENCE = 64
"""Shortest sequence for which this attention skips the keys that the first half of the queries cannot see."""
