"""Models of the Hugging Face hub: their options, tensor names and weights mapped to our GPT."""
