"""Observability of a front end: metrics, logs, traces."""
