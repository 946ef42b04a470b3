"""Experts' matrices in 8 and 4 bits: rounding, packing, and products that widen them on the way."""
