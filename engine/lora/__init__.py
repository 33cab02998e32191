"""Adapters of low rank (LoRA): read from PEFT's directories, and kept for the model's slots."""
