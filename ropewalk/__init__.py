"""ropewalk trains large models from end to end: raw corpus in, evaluated model out, with one recipe."""

__version__ = "0.1.0"
