"""POST /classify."""
