"""Models without a family, computed by transformers over the paged KV cache."""
