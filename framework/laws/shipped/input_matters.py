"""The law that the outputs depend on the inputs."""

from collections.abc import Iterable
from contextlib import suppress

import torch

from ...errors import listed
from ..law import Law, LawRegistry, Outcome, broken, holds, not_checked
from ..rows import UndecidedError, is_mask
from ..trial import Trial
from .future_is_not_seen import sees_its_target


@LawRegistry.register
class InputMatters(Law):
    """Exchange the inputs of the rows, one input at a time, and look for a change of outputs or loss; not of masks."""

    name = "input_matters"
    statement = "outputs depend on every input"
    remedy = "look for detached or unused inputs, and for a layer whose units are all inactive"
    is_persistent = True  # a head that starts at zero hides the inputs at the first step

    def check(self, trial: Trial) -> Outcome:
        """Compare outputs before and after the exchange."""
        with suppress(UndecidedError):
            if name := sees_its_target(trial):
                return broken(f"outputs see {name}, with which the loss compares them: nothing else is needed", {name})
        order = torch.arange(trial.rows).roll(1)
        every = trial.with_rows(order)
        different = {
            index: value
            for index, value in every.items()
            if index in trial.inputs and not torch.equal(value, trial.inputs[index])
        }
        # Without other inputs, those of zeros and ones are pictures or codes, and no masks.
        changed = {index: value for index, value in different.items() if not is_mask(value)} or different
        if not changed:
            targets = any(not torch.equal(value, trial.step.constants[index]) for index, value in every.items())
            return broken("all rows have equal inputs", {"all"}) if targets else not_checked("all rows are equal")
        scored = not trial.step.problem
        before = trial.evaluate(needs_loss=scored, train=False)
        without = []
        for group in self._groups(trial, changed):
            after = trial.evaluate({index: changed[index] for index in group}, needs_loss=scored, train=False)
            if all(map(torch.equal, before.outputs, after.outputs)) and not (scored and before.loss != after.loss):
                without += [trial.names.get(index, "") or f"number {index}" for index in group]
        if without:
            return broken(f"no output changes if the rows exchange their {listed(without, 3)}", without)
        return holds()

    def _groups(self, trial: Trial, changed: Iterable[int]) -> list[list[int]]:
        """Return the inputs one by one, but together those within a container, of which a model may use a part."""
        direct = trial.step.direct_inputs()
        alone = [[index] for index in changed if index in direct]
        nested = [index for index in changed if index not in direct]
        return [*alone, nested] if nested else alone
