"""Models that other servers serve, behind the same address."""
