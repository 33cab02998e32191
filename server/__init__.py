"""Front ends, supervisors and the `swell` command: HTTP in, engine requests out, text back."""
