"""vLLM's engine core hosted in an engine process. Only this package imports vLLM."""
