"""Responses and conversations that are kept for later requests, by all front ends of a node."""
