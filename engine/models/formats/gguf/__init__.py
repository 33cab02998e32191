"""Weights of GGUF files, expanded to floats as they are loaded."""
