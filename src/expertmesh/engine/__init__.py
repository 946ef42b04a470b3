"""Generation for many requests at once: a paged key-value cache, a scheduler, one batch per step."""
