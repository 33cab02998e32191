"""Who may use the server, and how much of it at once."""
