"""Shared by all processes: messages, transport, membership, settings, logs, health. No torch."""
