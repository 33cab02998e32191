"""From a request that may come in to the tokens and texts that answer it."""
