"""Fused kernels for CPUs, compiled by Numba."""
