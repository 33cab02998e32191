"""Commands that are clients of a running server, or of one started for them: chat, run-batch."""
