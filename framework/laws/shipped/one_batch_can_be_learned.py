"""The law that steps on one batch reduce its loss."""

import math
import time
from contextlib import suppress

import torch
from torch import Tensor, nn

from ...tensors import trainable
from ..law import Law, Outcome, broken, holds, not_checked
from ..reachable_targets import unreachable_targets
from ..rows import UndecidedError
from ..trial import Trial, set_gradients

FEW, MANY = 50, 200
"""Steps: all that most losses need to fall, and all that are made."""
SECONDS = 15.0
RATES = 1e-3, 1e-2
"""Learning rates of Adam that are tried; the first one that reduces the loss counts."""
LEAST_FALL = 0.02
"""The part of the loss that must go, of a loss that learns anything."""
LEAST_PART = 0.4
"""The part of what free outputs gain that the steps must gain; right trainings that were measured gain 0.7 or more."""
MOST_CLIPPED = 0.1
"""The part of the gradient that clipping leaves, above which it is not tried."""
NEAR = 0.01
"""The part of what free outputs gain that is nothing."""
MARGIN = 0.002
"""The part of the loss by which it must fall further with the inputs than without them."""


class OneBatchCanBeLearned(Law):
    """Take steps of Adam on one batch, also with the inputs of one row in all rows, and compare how the loss falls."""

    name = "one_batch_can_be_learned"
    statement = "steps on one batch reduce its loss"
    remedy = (
        "look for detach, a frozen or saturated layer, a loss of the wrong tensor, targets of other rows, and targets "
        "beyond the range of the outputs"
    )

    def check(self, trial: Trial) -> Outcome:
        """Compare the loss before and after the steps."""
        trial.loss_step()
        if sentence := unreachable_targets(trial):
            return broken(sentence)
        same, floor = self._without_inputs(trial), self._floor(trial)
        if outcome := self._of_clipping(trial):
            return outcome
        sentences = []
        for count, rate in ((FEW, RATES[0]), (MANY, RATES[0]), (MANY, RATES[1])):
            first, last, made = self._train(trial, None, count, rate)
            if not math.isfinite(first + last) or abs(first) <= NEAR * (first - floor):
                return not_checked("the loss is not finite, or starts at 0, such as that of a ratio of policies")
            if made < FEW:
                return not_checked(f"{made} steps take {SECONDS:.0f} seconds of processor time")
            if first - last < LEAST_FALL * abs(first):
                sentences.append(f"{made} steps on one batch change its loss from {first:.4g} to {last:.4g}")
                continue
            # Outputs that a loss compares with each other are rarely free, such as vectors of length 1.
            has_floor = not (_is_mostly_frozen(trial.model) or trial.compares_rows)
            if has_floor and first - last < LEAST_PART * (first - floor):
                reached = f"{made} steps on one batch reduce its loss from {first:.4g} to {last:.4g}"
                sentences.append(f"{reached}, where free outputs reach {floor:.4g}")
                continue
            if same is None:
                return holds(f"{first:.4g} → {last:.4g} in {made} steps")
            _, blind, _ = self._train(trial, same, made, rate)
            # As by pairs, which equal rows fit, too.
            is_reached = max(last, blind) - floor < NEAR * (first - floor)
            if blind - last > MARGIN * abs(first) or is_reached or _compares_pairs(trial):
                return holds(f"{first:.4g} → {last:.4g} in {made} steps")
            sentences.append(f"{made} steps reach {last:.4g} with the inputs and {blind:.4g} without them")
        return broken(sentences[-1])

    def _of_clipping(self, trial: Trial) -> Outcome | None:
        """Return a violation if the optimizer of the training learns the batch, but not from the clipped gradients."""
        if trial.clipping is None or trial.clipping[1] > MOST_CLIPPED * trial.clipping[0] or not trial.optimizers:
            return None
        norm = trial.clipping[1]
        first, free, _ = self._train(trial, None, MANY)
        _, clipped, _ = self._train(trial, None, MANY, norm=norm)
        if first - free > 5 * LEAST_FALL * abs(first) and first - clipped < LEAST_FALL * abs(first):
            return broken(
                f"{MANY} own updates on one batch reduce its loss from {first:.4g} to {free:.4g}, but to {clipped:.4g} "
                f"with gradients clipped to a norm of {norm:.1g}"
            )
        return None

    def _floor(self, trial: Trial) -> float:
        """Return the loss that outputs reach which are free to take any values, as a bound of what can be learned.

        It is infinite if the loss is an output itself.

        Raises:
            UndecidedError: the loss falls without end.
        """
        step = trial.step
        free = {
            key: item.clone().requires_grad_() if item.is_floating_point() else item
            for key, item in step.outputs.items()
        }
        leaves = [item for item in free.values() if item.requires_grad]
        if step.loss in step.outputs or not leaves:
            return float("inf")
        optimizer, losses = torch.optim.Adam(leaves, 0.05), [float("inf")]
        with trial.branch(), torch.enable_grad():
            for _ in range(MANY):
                loss = step.replay(outputs=free).loss
                losses.append(float(loss.detach()))
                set_gradients(leaves, loss)
                optimizer.step()
        if losses[-MANY // 4] - losses[-1] > 0.05 * abs(losses[1]):  # perhaps without end
            raise UndecidedError("the loss has no lower bound, such as that of a policy gradient")
        return min(losses)

    def _without_inputs(self, trial: Trial) -> dict[int, Tensor] | None:
        """Return the inputs of one row for all rows, if rows have separate targets."""
        step = trial.step
        inputs = set(step.constants_of_passes())
        targets = {index for index in trial.layout.layouts if index not in inputs}
        has_different = any(bool((step.constants[index] != step.constants[index][:1]).any()) for index in targets)
        if not has_different or trial.rows < 3:
            return None
        row = int(trial.longest_first[0])
        same = {index: item[row : row + 1].expand_as(item).clone() for index, item in trial.inputs.items()}
        return None if any(torch.equal(item, trial.inputs[index]) for index, item in same.items()) else same

    def _train(
        self,
        trial: Trial,
        constants: dict[int, Tensor] | None,
        count: int,
        rate: float | None = None,
        norm: float = math.inf,
    ) -> tuple[float, float, int]:
        """Return the loss before and after the steps, and their number.

        They are steps of Adam, or without a ``rate`` of the training's optimizers, with gradients clipped to ``norm``.
        """
        step, end = trial.step, time.process_time() + SECONDS
        with trial.branch(), torch.enable_grad():
            parameters = list(trainable(trial.model).values())
            optimizers = trial.optimizers if rate is None else [torch.optim.Adam(parameters, rate)]
            losses: list[float] = []
            while True:
                step.streams.restore()
                loss = step.replay(constants).loss
                losses.append(float(loss.detach()))
                if len(losses) > count or (time.process_time() > end and len(losses) > FEW // 10):
                    break
                set_gradients(parameters, loss)
                if math.isfinite(norm):
                    nn.utils.clip_grad_norm_(parameters, norm)
                for optimizer in optimizers:
                    optimizer.step()
            return losses[0], min(losses[-3:]), len(losses) - 1


def _compares_pairs(trial: Trial) -> bool:
    """Return whether rows are compared with each other, such as two answers: equal rows mean nothing then."""
    with suppress(UndecidedError):
        return trial.bundles.members > 1
    return False


def _is_mostly_frozen(model: nn.Module) -> bool:
    """Return whether few of the parameters learn, such as those of adapters, which cannot fit any outputs."""
    free = sum(item.numel() for item in model.parameters() if item.requires_grad)
    return 2 * free < sum(item.numel() for item in model.parameters())
