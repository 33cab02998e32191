"""Forwarding of requests for models that other servers serve."""
