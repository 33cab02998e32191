"""Draft heads: a decoder layer that predicts tokens from the states of its model."""
