"""Publishes the KV blocks that an engine holds, as vLLM's events."""
