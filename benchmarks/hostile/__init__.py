"""Hostile clients: what a single client's requests can cost a server, measured from outside."""
