"""The law that the gradient of a batch is the weighted mean of the gradients of its halves."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import listed
from ..law import Law, Outcome, broken, holds, not_checked
from ..recorded_step import DIVISIONS, Constant, Value
from ..sorted_rows import adds_sorted_rows
from ..trial import Trial, distance

LEAST_PART = 3e-3
"""The part of the gradient that must remain: the share of the halves is fitted, and its error remains, too.

Gradients of a model that casts to bfloat16 within its passes have 1e-3, which moved weights do not show.
"""
SELECTIONS = {"topk", "sort", "argsort", "kthvalue", "quantile", "nanquantile", "median"}

ELEMENTWISE = {
    *("sub", "__sub__", "__rsub__", "rsub", "subtract", "mul", "__mul__", "__rmul__", "multiply"),
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"),
}
SUMS = {"add", "radd"}
SPREADS = {"std", "var", "std_mean", "var_mean"}
"""Functions that normalise data, such as the advantages of a policy gradient."""


class HalvesMakeAWhole(Law):
    """Compare the gradient of the batch with those of batches that contain one of its halves twice, in eval mode.

    g = a·g₁ + (1 − a)·g₂, where a is the share of the first half, ½ or that of its tokens: the best a is fitted.
    """

    name = "halves_make_a_whole"
    statement = "the loss of a batch is the mean of the losses of its halves"
    remedy = "sum the losses of rows or tokens and divide once; no root, maximum or normalisation over the batch"

    def check(self, trial: Trial) -> Outcome:
        """Fit the share of the first half, and compare what remains with the noise of rounding."""
        total, count = trial.gradient(), trial.rows
        if shapes := _broadcast_targets(trial):
            return broken(f"{shapes} make a table of {count} x {count} in the loss: each output meets all targets")
        if trial.compares_rows:
            return not_checked("the loss compares the rows of a batch with each other by design")
        if len(trial.bundles) % 2:
            return not_checked("the batch has an odd number of rows")
        whole = trial.longest_first if trial.bundles.members == 1 else torch.arange(len(trial.bundles))
        halves = whole[: len(whole) // 2], whole[len(whole) // 2 :]
        if reason := _is_of_batch(trial):
            return not_checked(reason)
        one, other = self._gradients(trial, halves, 2)
        if outcome := self._of_scales(trial, halves, [one, other]):
            return outcome
        if trial.derivation and _has_terms(trial):
            return not_checked("the loss is a sum of terms, each perhaps a mean over other entries of the batch")
        difference = one - other
        share = float((total - other) @ difference / (difference @ difference).clamp(min=1e-300))
        remaining = distance(total, share * one + (1 - share) * other)
        if not trial.is_noise(remaining) and remaining > LEAST_PART * float(total.norm()):
            part = remaining / max(float(total.norm()), 1e-300)
            return broken(f"no mean of the halves' gradients gives that of the batch: {part:.1%} of it remain")
        named = "apart from batch normalisation" if trial.normalisations() else ""
        return holds(named)

    def _gradients(self, trial: Trial, halves: Sequence[Tensor], times: int) -> list[Tensor]:
        """Return the gradient of each half of the batch, with its rows some times."""
        return [self._gradient(trial, half.repeat(times)) for half in halves]

    def _of_scales(self, trial: Trial, halves: Sequence[Tensor], twice: Sequence[Tensor]) -> Outcome | None:
        """Return a violation if the loss adds a sum over rows to a mean over rows, so that their ratio is the batch's.

        With its rows n times, the gradient of a half is m + n·s, where m is that of means and s that of sums. The m of
        both halves are equal if they do not depend on the rows, such as those of a penalty on weights.
        """
        try:
            once, often = (self._gradients(trial, halves, times) for times in (1, 4))
        except (RuntimeError, ValueError, IndexError):  # of numbers of rows in the script
            return None
        size = float(trial.gradient().norm())
        sums = [two - one for one, two in zip(once, twice, strict=True)]
        means = [2 * one - two for one, two in zip(once, twice, strict=True)]
        curvature = [four - two - 2 * part for two, four, part in zip(twice, often, sums, strict=True)]

        def is_nothing(vector: Tensor) -> bool:
            norm = float(vector.norm())
            return trial.is_noise(norm, gradients=8) or norm <= LEAST_PART * size

        if not all(map(is_nothing, curvature)) or all(map(is_nothing, sums)):
            return None
        if is_nothing(means[0] - means[1]):
            trial.fixed_divisors = _divisors(trial, trial.rows)
            return None
        if _divisors(trial, trial.rows // trial.bundles.members) or _counts(trial):
            return None
        part = float(sums[0].norm() / once[0].norm())
        return broken(
            f"the loss adds sums over rows to means over rows: with each row twice, {part:.1%} of the gradient grow "
            "twofold, and the rest remains"
        )

    def _gradient(self, trial: Trial, order: torch.Tensor) -> torch.Tensor:
        constants = trial.with_bundles(trial.bundles, order)
        return trial.evaluate(constants, gradients=True, train=False, **trial.derivation).joint_gradient()


def _is_of_batch(trial: Trial) -> str:
    """Return by what the loss depends on the batch as a whole by design, if it does."""
    step = trial.step
    later = [item for call in step.calls if not call.is_pass for item in step.items_of(call)]
    given = {item for item in later if isinstance(item, Value)}
    if step.loss not in step.outputs and any(not item.ndim for key, item in step.outputs.items() if key in given):
        return "the model returns a number of the whole batch, such as how its experts are balanced"
    if name := adds_sorted_rows(trial):
        return f"the loss adds up sorted rows in their order by design ({name})"
    if trial.may_use_statistics:
        return "functions may normalise by the mean of the batch by design"
    if trial.layout.is_joined:
        return "the loss gets the targets of all rows joined"
    if _is_ratio(trial):
        return "the loss is a ratio of sums over the batch by design"
    names = {call.name for call in trial.step.calls}
    if chosen := sorted(names & SELECTIONS):
        return f"the loss selects rows or terms by design ({listed(chosen, 3)})"
    derived = {call.name for call in trial.step.derivations} if trial.derivation else set()
    if chosen := sorted(derived & (SELECTIONS | SPREADS)):
        return f"the loss normalises or selects data of the batch by design ({listed(chosen, 3)})"
    return ""


def _divisors(trial: Trial, rows: int) -> list[float]:
    """Return the numbers by which the script divides in the loss, if they are multiples of the number of rows."""
    numbers = [number for _, number in trial.step.scalings()]
    counts = [round(one) for number in numbers for one in (number, 1 / number) if abs(one) > 1]
    return [float(item) for item in counts if item % rows == 0]


def _counts(trial: Trial) -> bool:
    """Return whether the script divides by a whole number, which may count something in the batch, such as boxes."""
    return any(name in DIVISIONS and number > 2 and number == int(number) for name, number in trial.step.scalings())


def _is_ratio(trial: Trial) -> bool:
    """Return whether the loss divides sums of outputs by each other, such as the Dice loss."""
    return any(one == other and one[:1] != (trial.rows,) for one, other in _operands(trial, DIVISIONS))


def _has_terms(trial: Trial) -> bool:
    """Return whether the loss is a sum of terms, of which each may be a mean over other entries of the batch."""
    return any(not one and not other for one, other in _operands(trial, SUMS | {"stack"}))


def _broadcast_targets(trial: Trial) -> str:
    """Return the shapes of outputs and targets that a call combines to a table of rows by rows, if one does."""
    targets = {index for index in trial.layout.layouts if index not in trial.inputs}
    for call, shapes in trial.shapes_of_calls:
        items = [item for item in trial.step.items_of(call) if isinstance(item, (Value, Constant))]
        if call.name not in ELEMENTWISE or len(items) != 2:
            continue
        has_target = any(isinstance(item, Constant) and item.index in targets for item in items)
        if has_target and set(shapes) == {(trial.rows, 1), (trial.rows,)}:
            return f"shapes {shapes[0]} and {shapes[1]} of outputs and targets"
    return ""


def _operands(trial: Trial, names: set[str]) -> list[list[tuple[int, ...]]]:
    """Return the shapes of the first two operands of calls on several values that depend on outputs."""
    return [
        shapes[:2]
        for call, shapes in trial.shapes_of_calls
        if call.operation in names and sum(isinstance(item, Value) for item in trial.step.items_of(call)) > 1
    ]
