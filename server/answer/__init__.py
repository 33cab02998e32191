"""Answers as reasoning, content and tool calls, read as their text comes."""
