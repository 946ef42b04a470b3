"""Run directories: their files, what they compute in, and the one way to open a model."""
