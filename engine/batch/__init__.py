"""What the scheduler plans, the executor computes and both exchange."""
