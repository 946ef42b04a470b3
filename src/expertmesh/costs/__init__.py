"""Torch-free cost models: parameters, FLOPs, memory."""
