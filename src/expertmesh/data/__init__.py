"""What models learn from: documents, tokenizers, token files, and samples in a fixed order."""
