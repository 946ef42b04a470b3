"""Frozen, validated, torch-free configuration."""
