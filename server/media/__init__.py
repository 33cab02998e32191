"""Images of clients: where they come from, how they are decoded, and what encoders take of them."""
