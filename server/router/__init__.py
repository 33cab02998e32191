"""A front end's side of the cluster: membership, routing of requests, and their outputs."""
