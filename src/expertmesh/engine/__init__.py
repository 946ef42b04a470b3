"""Inference engine: continuous batching of many requests over a paged KV cache."""
