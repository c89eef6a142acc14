"""Digests of the training state for the record: equal on every device, and however tensors lie on the ranks."""

from .entries import link, state_digests
from .tensor_sums import ALGORITHM, sums

__all__ = ["ALGORITHM", "link", "state_digests", "sums"]
