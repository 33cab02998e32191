"""GGUF files as models: what they say of the network, its tokenizer and its chat template."""
