"""Batch-invariant operators: their result for a row does not depend on the other rows."""
