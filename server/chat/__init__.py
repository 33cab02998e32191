"""`swell chat`: a conversation in the terminal, with a running server or one of its own."""
