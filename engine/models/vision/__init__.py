"""Encoders of images: from pixels to the embeddings that stand for them in a prompt."""
