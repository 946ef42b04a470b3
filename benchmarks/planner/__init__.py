"""The planner's laboratory: its errors on published measurements, and what others claim."""
