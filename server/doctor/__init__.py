"""`swell doctor`."""
