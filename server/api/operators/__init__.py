"""vLLM's paths for operators, under their own names."""
