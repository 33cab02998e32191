"""Checkpoints whose weights are stored in few bits: GPTQ, AWQ, FP8, compressed-tensors."""
