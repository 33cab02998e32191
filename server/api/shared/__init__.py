"""What the requests and answers of several endpoints have in common."""
