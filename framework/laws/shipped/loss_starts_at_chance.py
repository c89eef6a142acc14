"""The law that an untrained model is not worse than a constant prediction."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..law import Law, Outcome, broken, holds, not_checked
from ..loss_numbers import LossPath, last_functions
from ..recorded_step import RecordedCall, Value
from ..rows import UndecidedError
from ..trial import Trial, set_gradients

FACTOR = 1.5
"""The first loss may be this many times that of the best constant prediction; default initialisations reach 1.3."""
MOST_OFFSET = 2.0
"""The distance from the best constant output that outputs of a regression soon cover, as to targets between 0 and 1."""
MOST_WRITES = 20
"""Changes of a parameter in place by its initialisation."""
FACTOR_OF_PAIRS = 5.0
"""The factor of a loss that compares rows with each other, whose similarities a small temperature spreads."""
LEAST_CHANCE = 0.01
"""The part of the loss of zeros that the best constant output must have; equal targets leave less."""
EQUAL = 1e-6
"""The same part, if the targets of rows differ."""
LEAST_ROWS = 8
NEAR = 1e-3
FITS = 100
OF_LOGITS = ("cross_entropy", "binary_cross_entropy_with_logits")
OF_PROBABILITIES = ("nll_loss", "binary_cross_entropy")


class LossStartsAtChance(Law):
    """Compare the first loss with that of the best constant output, found by steps on the recorded loss."""

    name = "loss_starts_at_chance"
    statement = "the loss starts near that of a constant prediction"
    remedy = "look at initialisation (large logits), at mean and scale of the targets, and at a softmax before the loss"

    def __init__(self) -> None:
        self._is_late = self._is_of_classes = False
        self._offset = 0.0
        """The largest distance of an output from the best constant one."""

    def check(self, trial: Trial) -> Outcome:
        """Try it at the first step only."""
        if self._is_late:
            return not_checked("")
        self._is_late = True
        step = trial.loss_step()
        if step.targets_are_inputs():
            return not_checked("the targets are the inputs")
        if outcome := self._of_probabilities(trial) or self._of_rows(trial):
            return outcome
        outputs = {value: item for value, item in step.outputs.items() if item.is_floating_point()}
        if not outputs or step.loss in step.outputs:
            return not_checked("the loss is not computed from outputs")
        if trial.layout.dimension or any(item.ndim < 1 or len(item) != trial.rows for item in outputs.values()):
            return not_checked("an output has no entry per row")
        first = trial.evaluate(train=False).loss
        constant = self._constant(trial, outputs)
        errors = torch.stack([self._half(trial, seed) for seed in range(8)])
        bar = float(errors.std())
        factor = FACTOR_OF_PAIRS if trial.compares_rows else FACTOR
        if trial.writes > MOST_WRITES:
            return not_checked("the weights were trained before")
        is_near = self._offset < MOST_OFFSET and not self._is_of_classes
        if float(first) > factor * constant + 3 * bar and float(first) > constant + 0.1 and not is_near:
            return broken(
                f"the loss starts at {float(first):.4g}; a constant prediction has {constant:.4g} ± {bar:.1g}"
            )
        return holds(f"{float(first):.4g}, a constant prediction {constant:.4g}")

    def _constant(self, trial: Trial, outputs: Mapping[Value, Tensor]) -> float:
        """Return the loss of the best constant output; of classes, not below that of equal probabilities.

        Raises:
            UndecidedError: there is none, or one is right for all rows.
        """
        step = trial.step
        constant, is_bounded = self._best_constant(trial, outputs)
        if not is_bounded and LossPath.of(step).origin != "cross_entropy":
            raise UndecidedError("no constant output minimises the loss")
        names = {call.name for call in step.calls}
        targets = [step.constants[index] for index in step.constants_of_calls() if index in trial.layout.layouts]
        has_different = any(bool((item != item[:1]).any()) for item in targets)
        zeros = self._of_zeros(trial, outputs)
        if constant < (EQUAL if has_different else LEAST_CHANCE) * zeros:
            raise UndecidedError("a constant output is right for all rows")
        is_binary = "binary_cross_entropy" in names
        has_classes = (
            any(not item.is_floating_point() for item in targets) or "binary_cross_entropy_with_logits" in names
        )
        self._is_of_classes = has_classes or is_binary or trial.compares_rows
        if has_classes:
            return max(constant, zeros)  # equal logits: ln C
        return max(constant, self._of_zeros(trial, outputs, 0.5)) if is_binary else constant

    def _of_probabilities(self, trial: Trial) -> Outcome | None:
        """Return a violation if a loss gets logits in place of log-probabilities, or probabilities in place of logits.

        ``nll_loss`` needs values whose exponentials sum to 1 over the classes; other losses contain a softmax or a
        sigmoid, so that their values must not be results of one.
        """
        sums, repeated = list[Tensor](), list[str]()

        def note(call: RecordedCall, arguments: Any, options: Any) -> None:
            if call.name not in (*OF_LOGITS, *OF_PROBABILITIES):
                return
            values = arguments[0] if arguments else options["input"]
            if call.name == "nll_loss":
                sums.append(values.detach().double().exp().sum(1 if values.ndim > 1 else 0))
            functions = last_functions(values)
            if call.name in OF_PROBABILITIES:
                functions = functions[1:] if functions[:1] in (["LogSoftmax"], ["Sigmoid"]) else []
            if functions and functions[0] in ("Softmax", "Sigmoid"):
                repeated.append(f"{call.name} gets values of a {functions[0].lower()}, to which another one is applied")

        with trial.branch(), torch.enable_grad():
            trial.step.streams.restore()
            trial.step.replay(observe=note)
        wrong = [item for item in sums if float((item - 1).abs().max()) > 0.01]
        if wrong:
            mean = float(wrong[0].mean())
            return broken(
                f"the loss takes outputs as log-probabilities that sum to {mean:.3g} over the classes, not to 1"
            )
        return broken(repeated[0]) if repeated else None

    def _of_rows(self, trial: Trial) -> Outcome | None:
        """Return a violation if a loss of classes is an undivided sum over rows, or a mean that is divided again.

        A loss that is half as large for a batch with each row twice is divided by numbers of the batch twice.
        """
        step, count, path = trial.step, trial.rows, LossPath.of(trial.step)
        if len(trial.steps) > 1 or count < LEAST_ROWS or trial.compares_rows or not path.origin:
            return None
        half = torch.arange(count // 2)
        try:
            one, twice = (
                float(trial.evaluate(trial.with_rows(order), train=False, **trial.derivation).loss)
                for order in (half, half.repeat(2))
            )
        except (RuntimeError, ValueError):  # of numbers of rows in the script
            return None
        ratio = twice / one if one else math.nan
        loss = f"the loss starts at {float(trial.evaluate(train=False).loss):.4g}"
        if abs(ratio - 0.5) < NEAR:
            return broken(
                f"{loss}: it is halved if the batch has each row twice, since it is divided by its rows twice"
            )
        is_sum, is_mean = abs(ratio - 2) < NEAR, abs(ratio - 1) < NEAR
        if not is_sum and not is_mean:
            return None
        is_of_classes = path.origin in ("cross_entropy", "nll_loss")
        multiple = math.prod(step.factors if is_of_classes else path.divisions) * (count if is_sum else 1)
        if is_of_classes and abs(multiple / count - 1) < NEAR:
            return broken(f"{loss}: it is a sum over {count} rows, {count} times their mean")
        if abs(multiple * count - 1) < NEAR and (is_of_classes or not _has_length(trial, count)):
            return broken(f"{loss}: the mean over {count} rows is divided by {count} once more")
        return None

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
            set_gradients(leaves, loss, materialize_grads=True)
            losses.append(float(loss.detach()))
            return loss.detach()

        with trial.branch(), torch.enable_grad():
            optimizer.step(closure)  # type: ignore[no-untyped-call]
        self._offset = max(float((outputs[value] - item.detach()).abs().max()) for value, item in constants.items())
        # Without a minimum, as for log-probabilities that are not normalised, the loss falls without end.
        slope = math.hypot(*(float(leaf.grad.norm()) for leaf in leaves if leaf.grad is not None))
        is_bounded = min(losses) > 0 and slope < 0.1 * abs(losses[0])
        return min(losses), is_bounded

    def _of_zeros(self, trial: Trial, outputs: Mapping[Value, Tensor], number: float = 0.0) -> float:
        """Return the loss of outputs that are 0, or another number."""
        zeros = {value: torch.full_like(item, number) for value, item in outputs.items()}
        with trial.branch(), torch.no_grad():
            return float(trial.step.replay(outputs={**trial.step.outputs, **zeros}).loss)

    def _half(self, trial: Trial, seed: int) -> Tensor:
        """Return the loss with a random half of the rows twice."""
        order = torch.randperm(trial.rows, generator=torch.Generator().manual_seed(seed))
        half = order[: max(1, trial.rows // 2)]
        return trial.evaluate(trial.with_rows(half.repeat(2 + trial.rows % 2)[: trial.rows]), train=False).loss


def _has_length(trial: Trial, count: int) -> bool:
    """Return whether a tensor of the step has as many entries in a row, or along a dimension of it, as it has rows."""
    shapes = trial.step.shapes | {tuple(item.shape) for item in trial.step.constants}
    return any(count in shape[1:] or math.prod(shape[1:]) == count for shape in shapes if len(shape) > 1)
