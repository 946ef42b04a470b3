"""Ranks and their communication: process groups, device meshes, collectives with gradients, all-to-all of tokens."""
