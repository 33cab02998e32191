"""Endpoints that return vectors or scores."""
