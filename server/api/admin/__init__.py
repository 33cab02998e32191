"""Paths for operators, behind the admin key: ours, and vLLM's under their own names."""
