"""The architectures of the hub that our GPT can run, a file each. Never imports torch."""
