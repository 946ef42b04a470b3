"""Decisions on how a spread layer runs, from numbers alone: no torch, no ranks."""
