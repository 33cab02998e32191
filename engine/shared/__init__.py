"""What all processes share: messages, transport, membership, settings, logs, health. No torch."""
