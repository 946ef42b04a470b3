"""Text: tokenizers, chat formats, and tokens that become text piece by piece."""
