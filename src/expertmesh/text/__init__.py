"""Text: tokenizers, chat formats, and incremental decoding of tokens."""
