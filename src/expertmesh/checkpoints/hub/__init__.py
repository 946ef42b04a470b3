"""Models of the Hugging Face hub: their options, names and weights as those of our GPT."""
