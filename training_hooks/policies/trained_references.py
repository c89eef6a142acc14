"""Whether a loss trains the model that gives its targets: a teacher, or the reference of a policy."""

import torch
from loopscope.doctor.senses import trained_sides
from torch import Tensor, nn


class TrainedReferences:
    """The weights of two models in a loss, at its measurements."""

    def __init__(self) -> None:
        self._before: list[Tensor] = []

    def measures_of(self, loss: Tensor) -> dict[str, float]:
        """Return whether both models have changed since the last measurement; empty for other losses."""
        sides = trained_sides(loss)
        if sides is None or not all(type(item) in (Tensor, nn.Parameter) for side in sides for item in side):
            return {}
        now = [min(side, key=Tensor.numel).detach().clone() for side in sides]
        before, self._before = self._before, now
        if not before:
            return {}
        return {"reference_learns": float(not any(map(_is_equal, before, now)))}


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
