"""Collectives between the processes that compute one model."""
