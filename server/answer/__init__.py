"""Incremental parsing of answers into reasoning, content and tool calls."""
