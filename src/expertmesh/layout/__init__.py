"""Torch-free types that several layers speak of."""
