"""Attention: masks, score rules, and implementations for CPUs and GPUs."""
