"""Conversion between text and tokens, and chat templates."""
