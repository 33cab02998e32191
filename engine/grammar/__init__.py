"""Enforces grammars on what is drawn: compiles them beside the steps, masks tokens within them."""
