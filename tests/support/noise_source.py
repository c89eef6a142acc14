"""Random generators in a module, of which functions of other modules use some."""

import numpy as np

GENERATOR = np.random.default_rng(1)
INDIRECT = np.random.default_rng(2)
UNUSED = np.random.default_rng(3)


def draw_indirectly() -> float:
    """Draw from a generator that only this function names."""
    return float(INDIRECT.random())
