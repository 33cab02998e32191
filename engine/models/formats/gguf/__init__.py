"""Weights of GGUF files, expanded to floats when loaded."""
