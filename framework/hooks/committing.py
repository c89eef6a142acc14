"""The third door of the model context: changes that outlast the rollback, as far as the hook's class declares them."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor, nn

from ..state import Vector, copied, live_gradients
from . import commits
from .commits import Clipping, CommitRecord, StatePart
from .measuring import Measuring


class Committing(Measuring):
    """The commit verbs: each checks and records a change, which is made after the rollback if the hook returned."""

    _commits: CommitRecord
    _parameters: list[nn.Parameter]

    def scale_gradients(self, factor: float | Tensor | Mapping[str, float | Tensor]) -> None:
        """Keep: multiply every gradient by ``factor``, or those of the named parameters each by its own.

        Factors are numbers or zero-dimensional tensors, which the hook then leaves alone.
        """
        if isinstance(factor, Mapping):
            commits.check_factors(self.model, factor)
            each = {name: self._lasting_factor(value) for name, value in factor.items()}
            change: Callable[[], None] = partial(commits.scale_each, self.model, each)
        else:
            kept = self._lasting_factor(factor)
            change = lambda: commits.scale(live_gradients(self._parameters), kept)
        self._commits.record(StatePart.GRADIENTS, "scale_gradients", change)

    def clamp_gradients(self, max_value: float) -> None:
        """Keep: bring every element of the gradients into [−max_value, max_value].

        The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
        """
        commits.check_clamping(self._parameters, max_value)
        self._commits.record(
            StatePart.GRADIENTS, "clamp_gradients", partial(commits.clamp, self._parameters, max_value)
        )

    def clip_gradients(self, max_norm: float) -> Clipping:
        """Keep: scale the gradients so that their joint norm is at most ``max_norm``; returns norm and factor now.

        The arithmetic is that of ``torch.nn.utils.clip_grad_norm_``, but that float16 and bfloat16 are reduced in
        float32. After earlier commits of this call, norm and factor are measured again.
        """
        live = live_gradients(self._parameters)
        clipping = Clipping.of(live, max_norm)
        if self._mutates or self._commits.changes:
            change = partial(commits.clip, self._parameters, max_norm)
        else:
            change = partial(commits.scale, live, clipping.factor)
        self._commits.record(StatePart.GRADIENTS, "clip_gradients", change)
        return clipping

    def replace_gradients(self, values: Vector) -> None:
        """Keep: give the parameters named in ``values`` these gradients, tensors that the hook then leaves alone."""
        commits.check_vector(self.model, values)
        kept = self._lasting(values)
        self._commits.record(
            StatePart.GRADIENTS, "replace_gradients", partial(commits.replace_gradients, self.model, kept)
        )

    def add_to_gradients(self, values: Vector, factor: Tensor) -> None:
        """Keep: add ``factor`` (zero-dimensional) times ``values``, tensors that the hook then leaves alone."""
        commits.check_vector(self.model, values)
        kept = self._lasting(values)
        lasting = factor.clone() if self._mutates else factor
        self._commits.record(
            StatePart.GRADIENTS, "add_to_gradients", partial(commits.add_scaled, self.model, kept, lasting)
        )

    def blend_parameters(self, target: Vector, weight: float) -> None:
        """Keep: θ ← (1 − weight)·θ + weight·target of the parameters in ``target``, then left alone by the hook."""
        commits.check_vector(self.model, target)
        kept = self._lasting(target)
        self._commits.record(StatePart.PARAMETERS, "blend_parameters", partial(commits.blend, self.model, kept, weight))

    def thaw_parameters(self, names: Iterable[str]) -> None:
        """Keep: train the named parameters from now on."""
        chosen = commits.parameters_named(self.model, names)
        self._commits.record(StatePart.PARAMETERS, "thaw_parameters", partial(commits.thaw, chosen))

    def reset_optimizer_state(self, names: Iterable[str]) -> None:
        """Keep: let the optimizer forget what it remembers of the named parameters."""
        chosen = commits.parameters_named(self.model, names)
        change = partial(commits.forget, self._task.optimizer, chosen)
        self._commits.record(StatePart.OPTIMIZER, "reset_optimizer_state", change)

    def _lasting(self, vector: Vector) -> Vector:
        """Copy a vector that the coming rollback might change."""
        return copied(vector) if self._mutates else vector

    def _lasting_factor(self, factor: float | Tensor) -> float | Tensor:
        return factor.clone() if self._mutates and isinstance(factor, Tensor) else factor
