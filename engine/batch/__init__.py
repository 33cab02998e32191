"""Types exchanged between the scheduler and executors."""
