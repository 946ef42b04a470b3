"""Experts on PyTorch's own products: the implementation on CPUs."""
