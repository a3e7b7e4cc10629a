"""Triton kernels. Each has a torch twin, which is its reference and runs on the CPU."""
