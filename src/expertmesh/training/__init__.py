"""Training: optimizers, loop, checkpoints, metrics."""
