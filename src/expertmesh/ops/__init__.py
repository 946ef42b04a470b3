"""Operators of the mixture-of-experts layer, one file each, every one with an oracle in `reference`."""
