"""The whole stack measured, the load generator, and the harness that tests use."""
