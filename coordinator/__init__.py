"""The coordinator: cluster membership, load of each engine, and the current wave."""
