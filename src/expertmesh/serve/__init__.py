"""The server: an OpenAI-compatible interface over one engine."""
