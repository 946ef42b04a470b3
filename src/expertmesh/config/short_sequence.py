"""Lengths at which attention on a CPU changes its algorithm, shared by the code (`ops/`) and its memory (`costs/`)."""

SHORT_SEQUENCE = 256
"""Longest sequence for which BF16 attention on a CPU computes and keeps its probabilities (`ops/attention/short.py`)."""
HALVED_SEQUENCE = 64
"""Shortest sequence for which this attention skips the keys that the first half of the queries cannot see."""
