"""The law that an untrained model is not worse than a constant prediction."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..recorded_step import RecordedCall, Value
from ..trial import Trial

FACTOR = 1.5
"""The first loss may be this many times that of the best constant prediction; default initialisations reach 1.3."""
FACTOR_OF_PAIRS = 5.0
"""The factor of a loss that compares rows with each other, whose similarities a small temperature spreads."""
LEAST_CHANCE = 0.01
"""The part of the loss of zeros that the best constant output must have; equal targets leave less."""
FITS = 100


@LawRegistry.register
class LossStartsAtChance(Law):
    """Compare the first loss with that of the best constant output, found by steps on the recorded loss."""

    name = "loss_starts_at_chance"
    statement = "the loss starts near that of a constant prediction"
    remedy = "look at initialisation (large logits), at mean and scale of the targets, and at a softmax before the loss"

    def __init__(self) -> None:
        self._is_late = False

    def check(self, trial: Trial) -> Outcome:
        """Try it at the first step only."""
        if self._is_late:
            return not_checked("")
        self._is_late = True
        step = trial.loss_step()
        if step.targets_are_inputs():
            return not_checked("the targets are the inputs")
        if outcome := self._of_probabilities(trial):
            return outcome
        outputs = {value: item for value, item in step.outputs.items() if item.is_floating_point()}
        if not outputs or step.loss in step.outputs:
            return not_checked("the loss is not computed from outputs")
        if trial.layout.dimension or any(item.ndim < 1 or len(item) != trial.rows for item in outputs.values()):
            return not_checked("an output has no entry per row")
        first = trial.evaluate(train=False).loss
        constant, is_bounded = self._best_constant(trial, outputs)
        if not is_bounded:
            return not_checked("no constant output minimises the loss")
        if constant < LEAST_CHANCE * self._of_zeros(trial, outputs):
            return not_checked("a constant output is right for all rows")
        targets = [item for item in step.constants_of_calls() if item in trial.layout.layouts]
        if any(not step.constants[index].is_floating_point() for index in targets):
            constant = max(constant, self._of_zeros(trial, outputs))  # equal logits: ln C
        errors = torch.stack([self._half(trial, seed) for seed in range(8)])
        bar = float(errors.std())
        factor = FACTOR_OF_PAIRS if trial.compares_rows else FACTOR
        if float(first) > factor * constant + 3 * bar and float(first) > constant + 0.1:
            return broken(
                f"the loss starts at {float(first):.4g}; a constant prediction has {constant:.4g} ± {bar:.1g}"
            )
        return holds(f"{float(first):.4g}, a constant prediction {constant:.4g}")

    def _of_probabilities(self, trial: Trial) -> Outcome | None:
        """Return a violation if ``nll_loss`` gets values whose exponentials do not sum to 1 over the classes."""
        step, sums = trial.step, list[Tensor]()

        def note(call: RecordedCall, arguments: Any, options: Any) -> None:
            if call.name == "nll_loss":
                values = arguments[0] if arguments else options["input"]
                sums.append(values.detach().double().exp().sum(1 if values.ndim > 1 else 0))

        with trial.branch(), torch.no_grad():
            step.replay(outputs=step.outputs, observe=note)
        wrong = [item for item in sums if float((item - 1).abs().max()) > 0.01]
        if not wrong:
            return None
        mean = float(wrong[0].mean())
        return broken(f"the loss takes outputs as log-probabilities that sum to {mean:.3g} over the classes, not to 1")

    def _best_constant(self, trial: Trial, outputs: Mapping[Value, Tensor]) -> tuple[float, bool]:
        """Return the loss of the best outputs that are equal for all rows, and whether it is a minimum."""
        step = trial.step
        constants = {
            value: torch.zeros(item.shape[-1] if item.ndim > 1 else 1, requires_grad=True, device=item.device)
            for value, item in outputs.items()
        }
        leaves = list(constants.values())
        optimizer = torch.optim.LBFGS(leaves, max_iter=FITS, line_search_fn="strong_wolfe")
        losses = []

        def closure() -> Tensor:
            full = {
                value: item.expand(outputs[value].shape).to(outputs[value].dtype) for value, item in constants.items()
            }
            loss = step.replay(outputs={**step.outputs, **full}).loss
            gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            losses.append(float(loss.detach()))
            return loss.detach()

        with trial.branch(), torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        # Without a minimum, as for log-probabilities that are not normalised, the loss falls without end.
        slope = math.hypot(*(float(leaf.grad.norm()) for leaf in leaves if leaf.grad is not None))
        is_bounded = min(losses) > 0 and slope < 0.1 * abs(losses[0])
        return min(losses), is_bounded

    def _of_zeros(self, trial: Trial, outputs: Mapping[Value, Tensor]) -> float:
        zeros = {value: torch.zeros_like(item) for value, item in outputs.items()}
        with trial.branch(), torch.no_grad():
            return float(trial.step.replay(outputs={**trial.step.outputs, **zeros}).loss)

    def _half(self, trial: Trial, seed: int) -> Tensor:
        """Return the loss with a random half of the rows twice."""
        order = torch.randperm(trial.rows, generator=torch.Generator().manual_seed(seed))
        half = order[: max(1, trial.rows // 2)]
        return trial.evaluate(trial.with_rows(half.repeat(2 + trial.rows % 2)[: trial.rows]), train=False).loss
