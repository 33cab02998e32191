"""Processes that start together are forks of one that has loaded their libraries."""
