"""Lengths at which attention takes another way: its code (`ops/`) and its memory (`costs/`) must agree on them."""

SHORT_SEQUENCE = 256
"""Tokens up to which attention in BF16 on a CPU goes by, and keeps, its probabilities (`ops/attention/short.py`)."""
HALVED_SEQUENCE = 64
"""Tokens from which on it leaves out the keys that the first half of the queries cannot see."""
