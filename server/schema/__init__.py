"""Bodies of requests and answers that several endpoints share."""
