"""Weights from GGUF files, expanded to floats as they are loaded."""
