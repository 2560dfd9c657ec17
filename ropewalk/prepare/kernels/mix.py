"""Numbers that look random, from any numbers: for arrays, outside of kernels."""

from __future__ import annotations

import numpy as np

from .words import Hashes


def mixed(values: Hashes) -> Hashes:
    """The finisher of SplitMix64 (Steele, Lea and Flood 2014): no two numbers become equal, and 0 stays 0."""
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)
