"""Digests of the training state for the record, independent of device and of the sharding over ranks."""

from .entries import link, state_digests
from .tensor_sums import ALGORITHM, sums

__all__ = ["ALGORITHM", "link", "state_digests", "sums"]
