"""Model families of this distribution beside the core's GPT: a folder each, with model, data, recipes and verb."""
