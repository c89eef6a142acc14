"""Training steps with one change of :data:`loopscope.laboratory.CHANGES`, in branches that are rolled back."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from loopscope import DebugInterventionHook, HookPoint, RunDataContext, StepSchedule
from loopscope.data import Batch
from loopscope.errors import UnsuitableError, require
from loopscope.hooks import ModelDataContext, RunInfo
from loopscope.laboratory import TrialChange
from torch import Tensor, nn

from .wider_precision import Widened, widen_layer


class BranchesHook(DebugInterventionHook):
    """A hook that trains branches from the state before one step."""

    hook_points = frozenset({HookPoint.PRE_STEP})
    needs_loss = True
    needs_loader = True
    needs_next_batch = True
    measured_steps: ClassVar[int] = 1
    """The number of steps, from the first one, that the hook is called for."""
    step: int
    """The first step, counted from 1."""
    usual_norm: float
    """The norm at which to clip."""

    def __post_init__(self) -> None:
        require(self.step >= 1, f"{self.name}.step is {self.step}; steps are counted from 1.")
        require(self.usual_norm >= 0, f"{self.name}.usual_norm is {self.usual_norm}; it must be at least 0.")
        self.step_schedule = StepSchedule(
            mode="burst", every_n_steps=2**62, burst_length=self.measured_steps, warmup=self.step - 1
        )

    def start(self, run: RunInfo) -> None:
        """Reject several processes."""
        if run.ranks.are_many:
            raise UnsuitableError(f"Hook {self.name!r} measures row by row, so it needs a run of one process.")


def possible_changes(changes: Iterable[TrialChange], run_ctx: RunDataContext) -> list[TrialChange]:
    """Return the changes without those of learning rates that are not numbers."""
    has_rates = not any(math.isnan(group.lr) for group in run_ctx.optimizer_groups)
    return [change for change in changes if has_rates or change.rate_factor == 1]


class ChangedSteps:
    """Steps and losses with one change, which is the precision of all passes, or of those of one layer."""

    def __init__(
        self,
        model_ctx: ModelDataContext,
        change: TrialChange,
        *,
        usual_norm: float = 0.0,
        layer: nn.Module | None = None,
    ) -> None:
        self.change = change
        self._model_ctx, self._layer = model_ctx, layer
        self._mode = None if change.precision is None else Widened(getattr(torch, change.precision))
        self._options: dict[str, Any] = {"rate_factor": change.rate_factor, "weight_decay": change.weight_decay}
        self._options["max_norm"] = usual_norm if change.clips else None

    @property
    def converted_count(self) -> int:
        """The number of tensors and casts that the change has widened."""
        return 0 if self._mode is None else self._mode.converted_count

    def passes(self) -> AbstractContextManager[object]:
        """Return the context of forward and backward passes."""
        if self._mode is None:
            return nullcontext()
        return self._mode if self._layer is None else widen_layer(self._layer, self._mode)

    @contextmanager
    def branch(self, draws: int) -> Iterator[None]:
        """Roll the body back; it starts after ``draws`` random numbers, which change the dropout masks."""
        with self._model_ctx.branch():
            for device in {torch.device("cpu"), self._model_ctx.device}:
                torch.rand(draws, device=device)
            if self.change.resets_optimizer:
                self._reset_optimizer()
            yield

    def take(self, batch: Batch, *, changed: bool = True) -> Tensor:
        """Take a step with the change, or without it except for the precision, and return its loss in float64."""
        return self._model_ctx.take_step(batch, passes=self.passes(), **(self._options if changed else {})).double()

    def losses(self, batches: Iterable[Batch]) -> Tensor:
        """Return the losses of batches; shape (batches,), float64."""
        with self.passes():
            return torch.stack([self._model_ctx.compute_batch_loss(batch) for batch in batches]).double()

    def _reset_optimizer(self) -> None:
        """Set the initial sums, moments and step counts of the optimizer to zero."""
        for entries in self._model_ctx.optimizer_state.values():
            for value in entries.values():
                if isinstance(value, Tensor):
                    value.zero_()
