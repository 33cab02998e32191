"""HTTP endpoints: one folder per API family, plus the modules that they share."""
