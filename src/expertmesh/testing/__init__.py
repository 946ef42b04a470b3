"""Helpers for tests and benchmarks; the runtime never imports this package."""
