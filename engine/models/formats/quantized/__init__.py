"""Checkpoints with quantized weights: GPTQ, AWQ, FP8, compressed-tensors."""
