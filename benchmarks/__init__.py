"""Benchmarks of the whole stack, a load generator, and the harness that tests use."""
