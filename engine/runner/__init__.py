"""Runs batch plans on one device: per-slot state, batch preparation, sampling."""
