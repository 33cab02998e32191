"""Draft heads: a decoder layer that predicts tokens from its model's states."""
