"""One file per family of models: what its config and its tensor names mean."""
