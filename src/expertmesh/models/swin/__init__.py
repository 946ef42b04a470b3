"""The Swin Transformer family: model and task."""
