"""Inference: cache, sampling, engine."""
