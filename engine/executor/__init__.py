"""Executors behind one interface: they compute the tokens of batch plans."""
