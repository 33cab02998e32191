"""Hostile clients: what one request of anybody may cost a server, measured from outside."""
