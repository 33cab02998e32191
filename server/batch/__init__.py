"""`swell run-batch`: processes a file of requests."""
