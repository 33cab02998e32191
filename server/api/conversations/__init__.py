"""/v1/conversations."""
