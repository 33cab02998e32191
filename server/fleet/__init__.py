"""The processes of one node: starting, watching, replacing and stopping them."""
