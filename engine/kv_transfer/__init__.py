"""Transfer of a prompt's KV blocks from the engine that computed them to another."""
