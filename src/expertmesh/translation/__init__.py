"""Texts of one language in another: beam search over an encoder-decoder."""
