"""The training stack: data, optimiser, loop, checkpoints, metrics."""
