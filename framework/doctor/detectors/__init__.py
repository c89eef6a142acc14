"""The detectors that come with loopscope, by subject; importing this package registers them."""

from ..detector import DetectorRegistry

DetectorRegistry.register_package(__name__, __path__)
