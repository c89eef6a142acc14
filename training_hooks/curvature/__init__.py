"""Second derivatives and step sizes."""

from .hessian import Hessian
from .lr_probe import LrProbe
from .sharpness import Sharpness

__all__ = ["Hessian", "LrProbe", "Sharpness"]
