"""GPU kernels, in Triton and of libraries. Each has a plain PyTorch twin, named in its docstring, that says what is
right."""
