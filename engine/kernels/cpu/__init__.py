"""Kernels for CPUs, in Python that Numba compiles."""
