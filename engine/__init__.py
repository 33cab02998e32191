"""The engine: one data-parallel rank with a scheduler, a paged KV cache and a model replica."""
