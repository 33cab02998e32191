"""KV blocks outside an engine's cache: tiers, transfers to other engines, and events about them."""
