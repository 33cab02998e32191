"""vLLM's engine core as what an engine process hosts. Only here is vLLM imported."""
