"""Trains an EAGLE-3 draft head for a model, on what the model itself writes."""
