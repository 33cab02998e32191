"""From texts to what engines make vectors of, and their vectors."""
