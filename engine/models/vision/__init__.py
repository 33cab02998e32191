"""Vision encoders: from pixels to the embeddings that replace image tokens in a prompt."""
