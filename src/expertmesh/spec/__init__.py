"""Torch-free descriptions of models: parameters, feed-forward layers, and sizes of optimizer moments."""
