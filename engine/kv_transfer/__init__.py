"""KV blocks that engines hand each other: what one has computed of a prompt, another reads."""
