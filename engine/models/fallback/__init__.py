"""Models without a family here, as transformers computes them, over the paged KV cache."""
