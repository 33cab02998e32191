"""GET and POST /admin/*."""
