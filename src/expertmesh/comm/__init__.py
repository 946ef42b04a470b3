"""Ranks and what they say to one another: groups, meshes, collectives with gradients, all-to-all of tokens."""
