"""The architectures of the hub that our GPT can be, a file each. Without torch."""
