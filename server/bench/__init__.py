"""`swell bench`: a load generator for OpenAI-compatible servers that also measures itself."""
