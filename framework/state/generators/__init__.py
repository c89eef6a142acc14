"""Random generators: the global ones, private ones of user code, and the random streams derived from a seed."""

from .private_generators import (
    Generator, generators_of, generators_of_methods, read_generator, seed_generator, write_generator,
)
from .random_streams import RandomStreams, StreamState, from_plain, plain, seed_everything

__all__ = [
    "Generator", "RandomStreams", "StreamState", "from_plain", "generators_of", "generators_of_methods", "plain",
    "read_generator", "seed_everything", "seed_generator", "write_generator",
]
