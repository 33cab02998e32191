"""GGUF files as models: network config, tokenizer and chat template."""
