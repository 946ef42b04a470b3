"""Tensors on disk: checkpoints of runs, and the files of models of the hub."""
