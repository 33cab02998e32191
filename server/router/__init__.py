"""A front end's side of the cluster: who is there, which engine gets a request, tokens back."""
