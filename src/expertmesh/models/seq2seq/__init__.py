"""The encoder-decoder family."""
