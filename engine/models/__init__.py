"""The decoder family and its checkpoint loading, driven by the Hugging Face config."""
