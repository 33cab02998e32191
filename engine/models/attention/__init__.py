"""Attention over a paged KV cache: per-step plans and the operators that execute them."""
