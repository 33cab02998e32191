"""`swell fetch`: a model of the Hugging Face hub into the local cache, before anybody serves it."""
