"""Draft heads: a decoder layer that foretells tokens from the states of its model."""
