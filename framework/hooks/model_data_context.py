"""Access of an intervention to the mutable training state: the model context."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from ..errors import LoopscopeError
from ..state import TrainingState, Vector, copied, is_partial, live_gradients, optimizers_of
from ..training import LossProbe, Profiler, TrainingTask
from . import commits
from .commits import Clipping, CommitRecord, StatePart
from .interventions import Interventions


class ExpiredError(LoopscopeError):
    """A model context was used after its hook call had ended."""


class ModelDataContext(Interventions):
    """Measurements, reversible changes and commits for one call of an intervention.

    All changes are rolled back when the call ends. Then, if the hook returned without an error, its commits are
    applied: the changes that the methods documented with "Commit" have checked and recorded. After the call every
    method raises :class:`ExpiredError`.

    Vectors are dicts from parameter names to tensors of the parameters' shapes (plain tensors or DTensors); a missing
    name means zeros. Losses, gradients and curvature are those of the training loss in the model's current modes.
    Measurements restore buffers, modes, gradients and random streams, so two measurements in one call use the same
    dropout mask.
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
        """Prepare for one call, whose random stream is identified by ``stream``: (name, point, step).

        The ``parameters`` are those of the model, in its order; passing them avoids a walk through the model. Full
        checkpoints are stored on ``device`` (``None``: the device of the state).
        """
        self._task = task
        self._state = state
        self._commits = record
        self._parameters = parameters
        self._mutates = mutates
        self._state_copy_device = device
        self._stream = stream
        self._steps_scheduler = loop == "step" or task.scheduler_interval == "step"
        self._profiler = profiler or Profiler()
        self._probe = LossProbe(task, state, self._profiler)
        self._checkpoints = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Expire the context: changes after the call would be neither rolled back nor committed."""
        name, point, step = self._stream
        vars(self).clear()
        self._expired_message = (
            f"The model context of hook {name!r} at {point} of step {step} was used after that call, when changes "
            "are no longer rolled back; use it only within intervene(), which receives a new one in every call."
        )

    if not TYPE_CHECKING:  # a visible __getattr__ would give every attribute the type Any

        def __getattr__(self, name: str) -> Any:
            """Raise :class:`ExpiredError` after the call: every method reads an attribute that no longer exists."""
            raise ExpiredError(self._expired_message) if "_expired_message" in vars(self) else AttributeError(name)

    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        """Commit: multiply every gradient by ``factor``, or the gradients of named parameters by their factors.

        Factors are numbers or zero-dimensional tensors.
        """
        if isinstance(factor, Mapping):
            commits.check_factors(self.model, factor)
            factors = {name: _copied_factor(value) for name, value in factor.items()}
            self._commits.record(StatePart.GRADIENTS, "scale_gradients", commits.scale_each, self.model, factors)
        else:
            copied_factor = _copied_factor(factor)
            parameters = self._parameters
            # Gradients are looked up when the change is applied: an earlier commit may create a parameter's gradient.
            change = lambda: commits.scale(live_gradients(parameters), copied_factor)
            self._commits.record(StatePart.GRADIENTS, "scale_gradients", change)

    def clamp_gradients(self, max_value: float) -> None:
        """Commit: clamp every element of the gradients to [−max_value, max_value].

        The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
        """
        if not max_value > 0:
            raise LoopscopeError(f"max_value is {max_value}; it must be positive.")
        if any(map(is_partial, live_gradients(self._parameters))):
            raise LoopscopeError(
                "clamp_gradients needs complete or sharded gradients, but a DTensor's gradient is a partial sum over "
                "ranks: the sum of clamped parts is not the clamped sum."
            )
        self._commits.record(StatePart.GRADIENTS, "clamp_gradients", commits.clamp, self._parameters, max_value)

    def clip_gradients(self, max_norm: float) -> Clipping:
        """Commit: scale the gradients so that their joint norm is at most ``max_norm``; return current norm and factor.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, except that float16 and bfloat16 are reduced in
        float32. If earlier commits of this call change the gradients, norm and factor are measured again.
        """
        live = live_gradients(self._parameters)
        clipping = Clipping.of(live, max_norm)
        # A rollback or an earlier commit may replace the gradients before this change is applied.
        if self._mutates or self._commits.changes:
            self._commits.record(StatePart.GRADIENTS, "clip_gradients", commits.clip, self._parameters, max_norm)
        else:
            self._commits.record(StatePart.GRADIENTS, "clip_gradients", commits.scale, live, clipping.factor)
        return clipping

    def replace_gradients(self, values: Vector) -> None:
        """Commit: set the gradients of the parameters in ``values``, which the hook must not change afterwards."""
        commits.check_vector(self.model, values)
        copies = self._protected(values)
        self._commits.record(StatePart.GRADIENTS, "replace_gradients", commits.replace_gradients, self.model, copies)

    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        """Commit: g ← g + factor·values, with a zero-dimensional factor; ``values`` must not change afterwards."""
        commits.check_vector(self.model, values)
        copies, scale = self._protected(values), factor.clone()
        self._commits.record(StatePart.GRADIENTS, "add_to_gradients", commits.add_scaled, self.model, copies, scale)

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Commit: θ ← (1 − weight)·θ + weight·target; the hook must not change ``target`` afterwards."""
        commits.check_vector(self.model, target)
        copies = self._protected(target)
        self._commits.record(StatePart.PARAMETERS, "blend_parameters", commits.blend, self.model, copies, weight)

    def thaw_parameters(self, names: Iterable[str]) -> None:
        """Commit: train the named parameters from now on.

        Raises:
            LoopscopeError: the model is trained by DistributedDataParallel, which cannot add parameters.
        """
        if self._task.ranks.averages and self._task.ranks.data:
            raise LoopscopeError(
                "DistributedDataParallel averages only gradients of parameters that were trainable when it was "
                "created, so no others can be thawed; train with one process."
            )
        parameters = commits.parameters_named(self.model, names)
        self._commits.record(StatePart.PARAMETERS, "thaw_parameters", commits.thaw, parameters)

    def reset_optimizer_state(self, names: Iterable[str]) -> None:
        """Commit: reset the optimizer's state of the named parameters."""
        parameters, state = commits.parameters_named(self.model, names), self._state
        change = lambda: commits.forget(optimizers_of(state), parameters)
        self._commits.record(StatePart.OPTIMIZER, "reset_optimizer_state", change)

    def _protected(self, vector: Vector) -> Vector:
        """Copy tensors that the rollback or the commits may change before they are used."""
        if self._mutates:
            return copied(vector)
        memory = commits.ParameterMemory(self._parameters)
        return {name: value.detach().clone() if memory.overlaps(value) else value for name, value in vector.items()}


def _copied_factor(factor: float | Tensor) -> float | Tensor:
    return factor.clone() if isinstance(factor, Tensor) else factor
