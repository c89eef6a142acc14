"""Periodic smoothing of the weights towards their values after the previous smoothing."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart, StepSchedule
from loopscope.errors import UsageError, listed
from loopscope.hooks import Alert, Metrics, ModelDataContext, RunInfo
from loopscope.tensors import Vector, is_sharded, joint_norm, local_shards, norm, norms, total_of, trainable
from torch import Tensor, nn

from ..measures import stacked
from .shadow_copies import ShadowCopies, refuse_factors, step_markers

BLOCK = 2**18
"""Elements per thread: a block of weights and one of buffers take 2 MB in float32 and fit in the caches."""


@dataclass(frozen=True, kw_only=True)
class SmoothingConfig:
    """Interval and strength of the smoothing.

    Args:
        update_interval: steps between two smoothings.
        alpha: the weight of the buffer, in (0, 1].
    """

    update_interval: int = 1000
    alpha: float = 0.5

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an invalid interval or weight."""
        if isinstance(self.update_interval, bool) or not isinstance(self.update_interval, int):
            raise ValueError(f"update_interval is {self.update_interval!r}; it must be a whole number of steps.")
        if self.update_interval < 1:
            raise ValueError(f"update_interval is {self.update_interval}; it must be at least 1.")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be in (0, 1].")


@torch.no_grad()
def blend_buffers(live: Vector, buffers: Vector, alpha: float, *, write_back: bool) -> None:
    """Move each buffer b to (1 − α)·θ + α·b, computed as ``b.lerp_(θ, 1 − α)``; with ``write_back`` set θ to b.

    On a CPU it works block by block, so that the values to write back are in the cache. DTensors are blended shard by
    shard, since both have the same layout.
    """
    live_shards, buffer_shards = local_shards(live.values()), local_shards(buffers.values())
    with step_markers(live_shards):
        for parameters, copies in _blocks(live_shards, buffer_shards):
            # torch._foreach_* is private, but one call replaces a call, on an accelerator a kernel launch, per tensor.
            torch._foreach_lerp_(copies, parameters, 1 - alpha)
            if write_back:
                torch._foreach_copy_(parameters, copies)


def distance(a: Vector, b: Vector) -> Tensor:
    """Return ‖a − b‖₂ of two vectors with the same names, zero-dimensional.

    Uses the memory of one block at a time; for DTensors, of one parameter.
    """
    parts = list(norms(a[name] - b[name] for name in a if is_sharded(a[name])))
    plain = [name for name in a if not is_sharded(a[name])]
    for a_block, b_block in _blocks([a[name] for name in plain], [b[name] for name in plain]):
        wide = [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in a_block]
        parts.append(joint_norm([tensor - other for tensor, other in zip(wide, b_block, strict=True)]))
    return total_of(stacked(parts))


def _blocks(a: list[Tensor], b: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Group pairs of equally shaped tensors into blocks of about equal size, cutting larger tensors.

    Tensors that are not on a CPU count as empty, so they form one group.
    """
    size = BLOCK * torch.get_num_threads()
    group: tuple[list[Tensor], list[Tensor]] = ([], [])
    elements = 0
    for tensor, other in zip(a, b, strict=True):
        count = tensor.numel() if tensor.is_cpu else 0
        if count > size and tensor.is_contiguous() and other.is_contiguous():
            pieces = [torch.split(whole.detach().view(-1), size) for whole in (tensor, other)]
            yield from (([piece], [other_piece]) for piece, other_piece in zip(*pieces, strict=True))
            continue
        group[0].append(tensor)
        group[1].append(other)
        elements += count
        if elements >= size:
            yield group
            group, elements = ([], []), 0
    if group[0]:
        yield group


class ModelSmoother:
    """Smooths the weights of any model in any loop; call :meth:`maybe_smooth` after every optimizer step.

    A smoothing sets live ← (1 − α)·live + α·buffer, then buffer ← live. The buffer starts as a copy of the model's
    current trained parameters, with their dtype, device, layout and sharding; shared parameters have one copy.
    Parameters that are frozen at construction are never smoothed. If a parameter is frozen later, it and its buffer
    stay unchanged while it is frozen.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(model.weight)
    >>> smoother = ModelSmoother(model, SmoothingConfig(update_interval=2, alpha=0.5))
    >>> for step in (1, 2):
    ...     _ = nn.init.constant_(model.weight, step)  # in place of a training step
    ...     print(smoother.maybe_smooth(step), model.weight.item())
    False 1.0
    True 1.0
    """

    def __init__(self, model: nn.Module, config: SmoothingConfig | None = None) -> None:
        """Copy the parameters."""
        self.config = config or SmoothingConfig()
        self._model = model
        self._live = trainable(model)
        self._copies = ShadowCopies()
        self._copies.take(model, self._live)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers by parameter name, as DTensors for sharded parameters."""
        return self._copies.of(self._live)

    def maybe_smooth(self, step: int) -> bool:
        """Smooth if ``step`` is a positive multiple of the interval, and return whether it is."""
        if due := step > 0 and step % self.config.update_interval == 0:
            self.smooth()
        return due

    def smooth(self) -> None:
        """Blend buffers and weights now."""
        live = {name: parameter for name, parameter in self._live.items() if parameter.requires_grad}
        blend_buffers(live, self._copies.of(live), self.config.alpha, write_back=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers, as DTensors for sharded parameters; the next smoothing changes them."""
        return self._copies.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the buffers of a checkpoint; raises ``ValueError`` if they belong to another model."""
        loaded = ShadowCopies()
        loaded.load_state_dict(state)
        loaded.fit(self._model)
        parameters = dict(self._model.named_parameters())
        self._live = {name: parameters[name] for name in loaded.copies}
        self._copies = loaded


@HookRegistry.register
class ModelSmoothing(InterventionHook):
    """Blend the weights with those of the previous smoothing every ``update_interval`` steps, and continue from there.

    After every optimizer step whose number is a multiple of the interval: live ← (1 − α)·live + α·buffer, then buffer
    ← live. The buffer starts as the initial weights. The optimizer's moments stay unchanged. The arithmetic is that of
    ``loopscope.training_hooks.ModelSmoother``; a custom training loop with it gives bitwise the same run.

    Assumes a run of many intervals, since smoothing pulls a short run, or fine-tuning, back to its start. Keeps one
    copy of the parameters that are trained when the run starts, shared ones once. Parameters that are frozen or thawed
    later are not smoothed. If float16 skips the step, it also skips the smoothing.

    Args:
        update_interval: steps between two smoothings.
        alpha: α, the weight of the buffer, in (0, 1]; at 1 the weights return to the start every time.
    """

    name = "model_smoothing"
    hook_points = frozenset({HookPoint.POST_STEP})
    mutates = False
    commits = frozenset({StatePart.PARAMETERS})
    _copies = Remembered(ShadowCopies, merged=True)
    _smoothings = Remembered(int)
    _thawed = Remembered(list[str], saved=False)
    _warned = Remembered(bool, saved=False)
    metrics = """
        distance | ‖θ − b‖₂, θ the weights before the smoothing, b the buffer: the weights after the previous smoothing,
            at first the initial weights | [0, ∞)
            | The distance that training covered in an interval. Constant: each interval repeats what smoothing
            undoes, or the weights wander. Falling: the weights converge.
        relative_jump | α·‖θ − b‖₂ / ‖θ‖₂ | [0, ∞], NaN
            | The relative change of the weights by the smoothing. Above about 0.1: expect a spike of the loss, and
            optimizer moments that no longer fit the weights; smooth more often, or with a smaller α.
        smoothings | number of smoothings so far, including this one | 1, 2, 3, … | The smoothing's number.
    """

    def __init__(self, *, update_interval: int = 1000, alpha: float = 0.5) -> None:
        try:
            self.config = SmoothingConfig(update_interval=update_interval, alpha=alpha)
        except ValueError as error:
            raise UsageError(f"model_smoothing.{error}") from error
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=update_interval, warmup=update_interval - 1)

    def start(self, run: RunInfo) -> None:
        """Copy the initial weights; in a resumed run, check the loaded copies."""
        refuse_factors(self.name, "blends", run.model)
        if not self._copies.copies:
            self._copies.take(run.model, trainable(run.model))
            return
        try:
            self._copies.fit(run.model)
        except ValueError as error:
            raise UsageError(f"Hook 'model_smoothing' cannot resume from its checkpoint. {error}") from error

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Blend the buffer with the weights, request that the weights become the buffer, and return the jump."""
        live = trainable(run_ctx.model)
        smoothed = {name: live[name] for name in self._copies.copies if name in live}
        self._thawed = [name for name in live if name not in smoothed]
        if not smoothed:
            return {}
        buffers = self._copies.of(smoothed)
        travelled = distance(smoothed, buffers)
        blend_buffers(smoothed, buffers, self.config.alpha, write_back=False)
        model_ctx.blend_parameters(buffers, 1.0)
        self._smoothings += 1
        jump = self.config.alpha * travelled / norm(smoothed)
        return {"distance": travelled, "relative_jump": jump, "smoothings": self._smoothings}

    def check(self, values: Mapping[str, Any], step: int) -> list[Alert]:
        """Return one alert about trained parameters without a buffer, since they were frozen at the start."""
        if not self._thawed or self._warned:
            return []
        self._warned = True
        sentence = (
            f"model_smoothing does not smooth {listed(self._thawed, 3)} at step {step}: these parameters were frozen "
            "when the run started, so they have no buffer."
        )
        return [Alert(sentence)]
