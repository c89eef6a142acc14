"""The laws that come with loopscope, one in each file; importing this package registers them."""

from ..law import LawRegistry

LawRegistry.register_package(__name__, __path__)
