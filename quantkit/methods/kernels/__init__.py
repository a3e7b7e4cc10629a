"""Triton kernels. Each has a torch twin that is its reference and serves the CPU."""
