"""Attention over a paged KV cache: plans of a step, and the operators that carry them out."""
