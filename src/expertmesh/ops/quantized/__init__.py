"""Experts' matrices in 8 and 4 bits: rounding and packing."""
