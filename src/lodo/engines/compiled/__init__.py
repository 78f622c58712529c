"""The step in plain torch operations that torch.compile fuses: for CUDA, and for CPUs without Numba."""
