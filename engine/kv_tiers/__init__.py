"""KV blocks stored outside an engine's memory, for other engines and later starts."""
