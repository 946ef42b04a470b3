"""The layer in NumPy, and the two-times rule; for tests and benchmarks, the package never imports it."""
