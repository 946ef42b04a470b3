"""The GPT family."""
