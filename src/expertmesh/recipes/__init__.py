"""Recipes: functions that return a complete RunConfig."""
