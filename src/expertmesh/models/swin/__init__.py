"""The Swin Transformer family."""
