"""The light checkpoint: what work that only runs forward and backward needs to go back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..state import StreamState, TrainingState, local_shards


@dataclass(frozen=True)
class LightSnapshot:
    """Copies of parameters and buffers, on their devices, and the states of the random streams."""

    tensors: list[Tensor]
    copies: list[Tensor]
    streams: StreamState

    @classmethod
    def of(cls, state: TrainingState) -> "LightSnapshot":
        """Copy them."""
        tensors = [*state.model.parameters(), *state.model.buffers()]
        copies = [tensor.detach().clone() for tensor in local_shards(tensors)]
        return cls(tensors, copies, state.streams.save())

    def restore(self, state: TrainingState) -> None:
        """Put them back, in place."""
        with torch.no_grad():
            torch._foreach_copy_(local_shards(self.tensors), self.copies)
        self.streams.restore()
