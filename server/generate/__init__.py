"""Generation: from an admitted request to the tokens and text of its answers."""
