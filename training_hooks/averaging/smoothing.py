"""Smoothing of the weights: every so many steps, back towards where the last smoothing left them."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from loopscope import HookPoint, HookRegistry, InterventionHook, Remembered, RunDataContext, StatePart, StepSchedule
from loopscope.errors import UsageError, listed
from loopscope.hooks import Metrics, ModelDataContext, RunInfo
from loopscope.state import Vector, is_sharded, joint_norm, local_shards, norm, norms, trainable
from torch import Tensor, nn

from ..measures import stacked
from .shadow_copies import ShadowCopies, refuse_factors, step_markers

BLOCK = 2**18
"""Elements for each thread: one block of weights and one of the buffers, 2 MB in float32, which stay in the caches."""


@dataclass(frozen=True, kw_only=True)
class SmoothingConfig:
    """How often weights are smoothed, and how far.

    Args:
        update_interval: steps from one smoothing to the next.
        alpha: the weight of the buffer, in (0, 1].
    """

    update_interval: int = 1000
    alpha: float = 0.5

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an interval or a weight that is none."""
        if isinstance(self.update_interval, bool) or not isinstance(self.update_interval, int):
            raise ValueError(f"update_interval is {self.update_interval!r}; it must be a whole number of steps.")
        if self.update_interval < 1:
            raise ValueError(f"update_interval is {self.update_interval}; it must be at least 1.")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must lie in (0, 1].")


@torch.no_grad()
def blend_buffers(live: Vector, buffers: Vector, alpha: float, *, write_back: bool) -> None:
    """Move each buffer b to (1 − α)·θ + α·b, computed as ``b.lerp_(θ, 1 − α)``; with ``write_back`` θ becomes b.

    On a CPU it goes block by block, so that what is written back comes from the cache. DTensors are blended shard by
    shard: both have the same layout.
    """
    ours, theirs = local_shards(live.values()), local_shards(buffers.values())
    with step_markers(ours):
        for parameters, copies in _blocks(ours, theirs):
            torch._foreach_lerp_(copies, parameters, 1 - alpha)
            if write_back:
                torch._foreach_copy_(parameters, copies)


def distance(a: Vector, b: Vector) -> Tensor:
    """Return ‖a − b‖₂ of two vectors with the same names, reduced in float32 or wider; zero-dimensional.

    Takes the memory of one block at a time, for DTensors that of one parameter.
    """
    parts = list(norms(a[name] - b[name] for name in a if is_sharded(a[name])))
    plain = [name for name in a if not is_sharded(a[name])]
    for ours, theirs in _blocks([a[name] for name in plain], [b[name] for name in plain]):
        wide = [one.detach().to(torch.promote_types(one.dtype, torch.float32)) for one in ours]
        parts.append(joint_norm([one - other for one, other in zip(wide, theirs, strict=True)]))
    total: Tensor = torch.linalg.vector_norm(stacked(parts))
    return total


def _blocks(ours: list[Tensor], theirs: list[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Group two lists of tensors, alike in pairs, into lists of about a block of elements, cutting larger tensors.

    Only on a CPU: what lies elsewhere is one group.
    """
    size = BLOCK * torch.get_num_threads()
    group: tuple[list[Tensor], list[Tensor]] = ([], [])
    elements = 0
    for one, other in zip(ours, theirs, strict=True):
        count = one.numel() if one.is_cpu else 0
        if count > size and one.is_contiguous() and other.is_contiguous():
            cut = [torch.split(each.detach().view(-1), size) for each in (one, other)]
            yield from (([piece], [its_pair]) for piece, its_pair in zip(*cut, strict=True))
            continue
        group[0].append(one)
        group[1].append(other)
        elements += count
        if elements >= size:
            yield group
            group, elements = ([], []), 0
    if group[0]:
        yield group


class ModelSmoother:
    """Smooths the weights of any model in any loop; call :meth:`maybe_smooth` after every optimizer step.

    At a smoothing, live ← (1 − α)·live + α·buffer, then buffer ← live; the buffer begins as the weights that the model
    has now. One copy of the parameters that are trained now, in their dtype, on their device, in their layout and
    sharding; nothing else is kept. A shared parameter is one. A parameter that is frozen now is never smoothed, one
    that is frozen later is left alone as long as it is, its buffer as well.

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
        """The buffers by parameter name, DTensors where the parameters are."""
        return self._copies.of(self._live)

    def maybe_smooth(self, step: int) -> bool:
        """Smooth if ``step`` is a multiple of the interval (0 is none), and return whether it was."""
        if due := step > 0 and step % self.config.update_interval == 0:
            self.smooth()
        return due

    def smooth(self) -> None:
        """Blend buffers and weights now, whatever the step."""
        live = {name: parameter for name, parameter in self._live.items() if parameter.requires_grad}
        blend_buffers(live, self._copies.of(live), self.config.alpha, write_back=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the buffers, DTensors where the parameters are; they change with the next smoothing."""
        return self._copies.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with the buffers of a checkpoint; raises ``ValueError`` if they are of another model."""
        loaded = ShadowCopies()
        loaded.load_state_dict(state)
        loaded.fit(self._model)
        parameters = dict(self._model.named_parameters())
        self._live = {name: parameters[name] for name in loaded.copies}
        self._copies = loaded


@HookRegistry.register
class ModelSmoothing(InterventionHook):
    """Blend the weights with those of the last smoothing, every ``update_interval`` steps, and train on from there.

    After an optimizer step whose number is a multiple of the interval: live ← (1 − α)·live + α·buffer, then buffer ←
    live. The buffer begins as the starting weights. The optimizer's moments stay as they were. The arithmetic is that
    of ``loopscope.training_hooks.ModelSmoother``, with which a loop of one's own makes the same run bit for bit.

    Assumes a run of many intervals: a short one, or fine-tuning, is pulled back to where it began. Keeps one copy of
    the parameters that are trained when the run starts, each shared one once; one that is frozen later is left alone,
    one that is thawed later is not smoothed. A smoothing whose step is skipped (float16) is left out.

    Args:
        update_interval: steps from one smoothing to the next.
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
        distance | ‖θ − b‖₂, θ the weights before the smoothing, b the buffer: the weights after the one before it, at
            first those of the start | [0, ∞)
            | How far training went in an interval. Steady: each interval repeats what smoothing takes back, or the
            weights wander; falling: they settle.
        relative_jump | α·‖θ − b‖₂ / ‖θ‖₂ | [0, ∞]
            | How far the smoothing moves the weights, relative to them. Above about 0.1 expect a spike of the loss and
            moments of the optimizer that belong to other weights: smooth more often, or with a smaller α.
        smoothings | number of smoothings so far, this one included | 1, 2, 3, … | Counts them.
    """

    def __init__(self, *, update_interval: int = 1000, alpha: float = 0.5) -> None:
        try:
            self.config = SmoothingConfig(update_interval=update_interval, alpha=alpha)
        except ValueError as error:
            raise UsageError(f"model_smoothing.{error}") from error
        self.step_schedule = StepSchedule(mode="stride", every_n_steps=update_interval, warmup=update_interval - 1)

    def start(self, run: RunInfo) -> None:
        """Copy the weights that the strategy begins with, unless it goes on from a checkpoint."""
        refuse_factors(self.name, "blends", run.model)
        if not self._copies.copies:
            self._copies.take(run.model, trainable(run.model))
            return
        try:
            self._copies.fit(run.model)
        except ValueError as error:
            raise UsageError(f"Hook 'model_smoothing' cannot go on from its checkpoint. {error}") from error

    def intervene(self, run_ctx: RunDataContext, model_ctx: ModelDataContext) -> Metrics:
        """Blend the buffer with the weights, ask for the weights to become it, and return how far they jump."""
        live = trainable(run_ctx.model)
        smoothed = {name: live[name] for name in self._copies.copies if name in live}
        self._thawed = [name for name in live if name not in smoothed]
        if not smoothed:
            return {}
        buffers = self._copies.of(smoothed)
        before = distance(smoothed, buffers)
        blend_buffers(smoothed, buffers, self.config.alpha, write_back=False)
        model_ctx.blend_parameters(buffers, 1.0)
        self._smoothings += 1
        jump = self.config.alpha * before / norm(smoothed)
        return {"distance": before, "relative_jump": jump, "smoothings": self._smoothings}

    def check(self, values: Mapping[str, Any], step: int) -> None:
        """Warn, once, of parameters that are trained but were frozen when the buffer was made."""
        if self._thawed and not self._warned:
            self._warned = True
            warnings.warn(
                f"model_smoothing leaves {listed(self._thawed, 3)} alone at step {step}: frozen when the run started, "
                "and so without a buffer.",
                stacklevel=2,
            )
