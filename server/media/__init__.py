"""Images in requests: fetching, decoding and preprocessing."""
