"""Averages of a model's weights over time, beside the model."""

from collections.abc import Mapping
from typing import Any

import torch
from loopscope.hooks import Remembered, Remembering
from loopscope.state import local_shards, trainable, whole
from torch import Tensor, nn

from .shadow_copies import ShadowCopies, floating_buffers
from .xla import step_markers


class WeightAverage(Remembering):
    """The average of all weights seen so far, those of step i with the weight dᵗ⁻ⁱ, t the last step seen.

    d = 1 is the equal average of SWA (arXiv 1803.05407), d < 1 an exponential moving average with its bias corrected
    as Adam's moments are: no weight is on the initial values, and the first average is the first sample. The decay is
    per step, whatever the distance of the samples.

    Averaged are the parameters that are trained at the first sample and all floating-point buffers, such as the
    statistics of batch normalisation, in float32 or wider: at d = 0.999 a bfloat16 average would not move. Of a
    DTensor it is this rank's shard.
    """

    samples = Remembered(int)
    last_step = Remembered(int)
    _total = Remembered(float)
    _copies = Remembered(ShadowCopies, merged=True)
    _parameters = Remembered(dict[str, nn.Parameter], saved=False)

    def __init__(self, decay: float) -> None:
        self.decay = decay

    @torch.no_grad()
    def sample(self, model: nn.Module, step: int) -> None:
        """Include the weights after ``step`` in the average."""
        buffers = floating_buffers(model)
        self._total = self._total * self.decay ** (step - self.last_step) + 1
        self.samples, self.last_step = self.samples + 1, step
        if self.samples == 1:
            self._copies.take(model, trainable(model) | buffers, widen=True)
            return
        shards = self._copies.shards
        if not self._parameters:
            self._parameters = {name: value for name, value in model.named_parameters() if name in shards}
        live = local_shards(self._parameters.values())
        with step_markers(live):
            _move([shards[name] for name in self._parameters], live, 1 / self._total)
            for name, buffer in buffers.items():
                _move_buffer(shards, name, buffer, 1 / self._total)

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the averages by name, DTensors where the model's tensors are; they change with the next sample."""
        live = {**dict(model.named_parameters()), **floating_buffers(model)}
        return self._copies.like({name: live[name] for name in self._copies.shards if name in live})

    def fit(self, model: nn.Module) -> None:
        """Move loaded averages to the model's devices; raises ``ValueError`` if they are of another model."""
        if self.samples:
            self._copies.fit(model, widen=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the averages of :meth:`state_dict`; :meth:`fit` refuses those of another model."""
        super().load_state_dict(state)
        self._parameters = {}


def _move(averages: list[Tensor], live: list[Tensor], weight: float) -> None:
    """Move averages towards tensors of the same or a narrower dtype, in place."""
    pairs = list(zip(averages, live, strict=True))
    alike = [pair for pair in pairs if pair[0].dtype is pair[1].dtype]
    if alike:
        torch._foreach_lerp_([average for average, _ in alike], [tensor for _, tensor in alike], weight)
    for average, tensor in pairs if len(alike) < len(pairs) else ():
        if average.dtype is not tensor.dtype:
            average.lerp_(tensor.to(average.dtype), weight)


def _move_buffer(averages: dict[str, Tensor], name: str, buffer: Tensor, weight: float) -> None:
    """Move the average of a buffer; what never changes stays as it is, be it the −∞ of a mask.

    One that is new, or has another shape than before, is taken as it is.
    """
    (live,) = local_shards([buffer])
    wide = live.to(torch.promote_types(live.dtype, torch.float32))
    if name not in averages or averages[name].shape != wide.shape:
        averages[name] = wide.clone()
    else:
        averages[name].copy_(torch.where(averages[name] == wide, wide, averages[name].lerp(wide, weight)))


def averaged_state_dict(model: nn.Module, averages: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the model's state dict with averages in the place of its tensors, in its dtypes, under its names.

    What has no average (frozen parameters, counters) is as it is now. Sharded tensors are gathered, by all ranks.
    """
    live = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    names = {id(tensor): name for name, tensor in live.items()}
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    for key, value in state.items():
        if isinstance(value, Tensor):
            average = averages.get(names.get(id(value), ""), value)
            state[key] = whole(average.detach()).to(value.dtype)
    return state
