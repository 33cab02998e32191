"""The model: a decoder built from a Hugging Face checkpoint, over a paged KV cache."""
