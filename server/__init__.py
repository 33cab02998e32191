"""The front end and the supervisor: HTTP in, engine requests out, text back."""
