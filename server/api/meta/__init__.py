"""Models, health, version and metrics."""
