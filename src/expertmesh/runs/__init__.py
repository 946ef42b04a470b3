"""Run directories: their files, their precision, and the opening of models."""
