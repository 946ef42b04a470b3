"""Training data: documents, token files, conversations, and samples in a fixed order."""
