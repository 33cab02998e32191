"""Tells others which KV blocks an engine holds, in vLLM's events."""
