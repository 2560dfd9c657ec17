"""GPU kernels in Triton. Each docstring names its reference implementation in plain PyTorch."""
