"""The status page and what it shows."""
