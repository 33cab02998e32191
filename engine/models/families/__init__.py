"""One file per model family: what its config and its tensor names mean."""
