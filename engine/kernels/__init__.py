"""Fused kernels: one compiled function each for what stock operators do in many passes."""
