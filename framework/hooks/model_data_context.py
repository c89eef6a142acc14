"""The model context: the only way in which an intervention reaches the mutable training state."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ..errors import LoopscopeError
from ..state import TrainingState, Vector, copied, is_partial, live_gradients, optimizers_of
from ..training import LossProbe, Profiler, TrainingTask
from . import commits
from .commits import Clipping, CommitRecord, StatePart
from .experimenting import Experimenting


class ExpiredError(LoopscopeError):
    """A model context was used when the call that it was made for had ended."""


class ModelDataContext(Experimenting):
    """What an intervention may do in one call: measure, experiment, commit.

    Everything it did is rolled back when the call ends; then, if the hook returned, the commits that it asked for are
    made: what the verbs that begin with "Keep" have checked and recorded. After the call every verb is refused.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors); a name
    that is missing stands for zeros. Losses, gradients and curvature are those of the training loss in the model's
    present modes. What measuring them needs (buffers, modes, gradients, random streams) is borrowed and put back, so
    that two measurements in one call see the same dropout mask.
    """

    def __init__(
        self,
        task: TrainingTask,
        state: TrainingState,
        record: CommitRecord,
        parameters: list[nn.Parameter],
        *,
        mutates: bool,
        device: torch.device | None,
        stream: tuple[str, str, int],
        loop: str,
        profiler: Profiler | None = None,
    ) -> None:
        """Serve one call, whose random stream is that of ``stream``: (name, point, step).

        The ``parameters`` are the model's, in its order, which nobody then needs to walk through again; full
        checkpoints live on ``device`` (``None``: where the state does).
        """
        self._task = task
        self._state = state
        self._commits = record
        self._parameters = parameters
        self._mutates = mutates
        self._snapshot_device = device
        self._stream = stream
        self._steps_scheduler = loop == "step" or task.scheduler_interval == "step"
        self._profiler = profiler or Profiler()
        self._probe = LossProbe(task, state, self._profiler)
        self._checkpoints = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Forget everything: nothing that is done after the call would be rolled back or kept."""
        name, point, step = self._stream
        vars(self).clear()
        self._over = (
            f"The model context of hook {name!r} at {point} of step {step} was used after that call, which nothing "
            "protects the run from: use it only within intervene(), which is given a new one at every call."
        )

    if not TYPE_CHECKING:  # where it would make every attribute one of any type

        def __getattr__(self, name: str) -> Any:
            """Refuse what is gone since the call ended: whatever verb is used looks for some of it first."""
            raise ExpiredError(self._over) if "_over" in vars(self) else AttributeError(name)

    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        """Keep: multiply every gradient by ``factor``, or those of the named parameters each by its own.

        Factors are numbers or zero-dimensional tensors, which the hook then leaves alone.
        """
        if isinstance(factor, Mapping):
            commits.check_factors(self.model, factor)
            each = {name: _lasting_factor(value) for name, value in factor.items()}
            self._commits.record(StatePart.GRADIENTS, "scale_gradients", commits.scale_each, self.model, each)
        else:
            kept = _lasting_factor(factor)
            parameters = self._parameters
            # Looked up when the change is made, since an earlier commit may give a parameter its first gradient.
            change = lambda: commits.scale(live_gradients(parameters), kept)
            self._commits.record(StatePart.GRADIENTS, "scale_gradients", change)

    def clamp_gradients(self, max_value: float) -> None:
        """Keep: bring every element of the gradients into [−max_value, max_value].

        The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
        """
        if not max_value > 0:
            raise LoopscopeError(f"max_value is {max_value}; the largest magnitude of an element must be positive.")
        if any(map(is_partial, live_gradients(self._parameters))):
            raise LoopscopeError(
                "clamp_gradients needs gradients that are whole or sharded, but a DTensor's are partial sums over "
                "ranks: the sum of clamped parts is not the clamped sum."
            )
        self._commits.record(StatePart.GRADIENTS, "clamp_gradients", commits.clamp, self._parameters, max_value)

    def clip_gradients(self, max_norm: float) -> Clipping:
        """Keep: scale the gradients so that their joint norm is at most ``max_norm``; returns norm and factor now.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, but that float16 and bfloat16 are reduced in
        float32. After earlier commits of this call, norm and factor are measured again.
        """
        live = live_gradients(self._parameters)
        clipping = Clipping.of(live, max_norm)
        # With a rollback or an earlier commit in between, the gradients may be others by the time of this change.
        if self._mutates or self._commits.changes:
            self._commits.record(StatePart.GRADIENTS, "clip_gradients", commits.clip, self._parameters, max_norm)
        else:
            self._commits.record(StatePart.GRADIENTS, "clip_gradients", commits.scale, live, clipping.factor)
        return clipping

    def replace_gradients(self, values: Vector) -> None:
        """Keep: give the parameters named in ``values`` these gradients, tensors that the hook then leaves alone."""
        commits.check_vector(self.model, values)
        kept = self._lasting(values)
        self._commits.record(StatePart.GRADIENTS, "replace_gradients", commits.replace_gradients, self.model, kept)

    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        """Keep: add ``factor`` (zero-dimensional) times ``values``, tensors that the hook then leaves alone."""
        commits.check_vector(self.model, values)
        kept, by = self._lasting(values), factor.clone()
        self._commits.record(StatePart.GRADIENTS, "add_to_gradients", commits.add_scaled, self.model, kept, by)

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Keep: θ ← (1 − weight)·θ + weight·target of the parameters in ``target``, then left alone by the hook."""
        commits.check_vector(self.model, target)
        kept = self._lasting(target)
        self._commits.record(StatePart.PARAMETERS, "blend_parameters", commits.blend, self.model, kept, weight)

    def thaw_parameters(self, names: Iterable[str]) -> None:
        """Keep: train the named parameters from now on; not under DistributedDataParallel, which does not know them."""
        if self._task.ranks.averages and self._task.ranks.data:
            raise LoopscopeError(
                "DistributedDataParallel averages the gradients of parameters that were trained when it was made, so "
                "no others can be thawed; train by one process."
            )
        chosen = commits.parameters_named(self.model, names)
        self._commits.record(StatePart.PARAMETERS, "thaw_parameters", commits.thaw, chosen)

    def reset_optimizer_state(self, names: Iterable[str]) -> None:
        """Keep: let the optimizer forget what it remembers of the named parameters."""
        chosen, state = commits.parameters_named(self.model, names), self._state
        change = lambda: commits.forget(optimizers_of(state), chosen)
        self._commits.record(StatePart.OPTIMIZER, "reset_optimizer_state", change)

    def _lasting(self, vector: Vector) -> Vector:
        """Copy what the coming rollback, or the commits themselves, might change before it is used."""
        if self._mutates:
            return copied(vector)
        memory = commits.Memory(self._parameters)
        return {name: value.detach().clone() if memory.holds(value) else value for name, value in vector.items()}


def _lasting_factor(factor: float | Tensor) -> float | Tensor:
    return factor.clone() if isinstance(factor, Tensor) else factor
