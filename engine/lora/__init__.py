"""Low-rank adapters (LoRA): read from PEFT directories, and stored for the model's slots."""
