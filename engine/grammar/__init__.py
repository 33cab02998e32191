"""Enforces grammars on sampling: compiles them in the background, and masks tokens."""
