"""The experts of layers spread over ranks: how they are stored and gathered, and how tokens reach them."""
