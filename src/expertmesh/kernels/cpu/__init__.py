"""Kernels for processors, in C: built at first use, see `build.py`."""
