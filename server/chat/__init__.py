"""`swell chat`: a conversation in the terminal, with a running server or a temporary one."""
