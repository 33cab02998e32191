"""Operator endpoints behind the admin key: Swell's own, and vLLM's under their own names."""
