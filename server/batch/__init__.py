"""`swell run-batch`: answers a file of requests."""
