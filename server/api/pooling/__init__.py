"""POST /pooling."""
