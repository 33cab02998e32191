"""Kernels for CUDA devices, written in Python and compiled by Triton, which torch depends on."""
