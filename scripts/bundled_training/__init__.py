"""Trains, measures and writes the small language model of ``engine/bundled_model``."""
