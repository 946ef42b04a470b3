"""Translation of texts: beam search over an encoder-decoder."""
