"""GPU kernels in Triton. Each has a plain PyTorch twin, named in its docstring, that says what is right."""
