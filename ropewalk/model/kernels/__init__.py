"""GPU kernels, in Triton and of libraries. Each docstring names a plain PyTorch twin, which defines correctness."""
