"""Fused kernels: single compiled functions that replace several stock operators."""
