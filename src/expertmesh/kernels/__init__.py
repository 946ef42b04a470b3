"""Triton kernels. Only `expertmesh.ops` imports them, and only inside functions, so that Triton stays optional.

A kernel module has `@triton.jit` functions and the host functions that allocate, choose tiles and launch. Rules: no
autotuner and no atomics. Tile sizes and grids depend on shapes only, never on values. Every address is int64 and every
access masked. So a launch needs no host synchronisation and can be captured in a CUDA graph.
"""
