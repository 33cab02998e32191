"""KV blocks beyond an engine's own memory: in files that other engines and later starts read."""
