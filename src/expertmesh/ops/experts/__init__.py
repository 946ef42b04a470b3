"""Experts on sorted rows, as one autograd operator and its backends."""
