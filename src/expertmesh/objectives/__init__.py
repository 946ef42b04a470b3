"""Objectives of fine-tuning as pure functions of scores of answers: no model, no data, no ranks."""
