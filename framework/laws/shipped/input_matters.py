"""The law that the outputs depend on the inputs."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import listed
from ..law import Law, Outcome, broken, holds, not_checked
from ..lost_inputs import lost_inputs
from ..rows import UndecidedError, is_mask
from ..trial import Trial
from .future_is_not_seen import sees_its_target

MOST_CALLS = 8


@dataclass(frozen=True)
class _InnerCall:
    """A call of a module within the model, with several tensors that have an entry for each row."""

    module: nn.Module
    inputs: tuple[Any, ...]
    options: dict[str, Any]
    tensors: list[Tensor]
    output: Tensor

    def unused(self) -> list[str]:
        """Return the names of the tensors whose rows may be exchanged without a change of the output."""
        names = signature(self.module.forward).bind(*self.inputs, **self.options).arguments
        found = []
        for tensor in self.tensors:
            other = tensor.roll(1, 0)

            def exchanged(item: Any, tensor: Tensor = tensor, other: Tensor = other) -> Any:
                return other if item is tensor else item

            inputs = map(exchanged, self.inputs)
            result = self.module(*inputs, **{name: exchanged(item) for name, item in self.options.items()})
            if not torch.equal(other, tensor) and torch.equal(result, self.output):
                found += [name for name, item in names.items() if item is tensor]
        return found


class InputMatters(Law):
    """Exchange the inputs of the rows, one input at a time, and look for a change of outputs or loss; not of masks."""

    name = "input_matters"
    statement = "outputs depend on every input"
    remedy = (
        "look for detached or unused inputs, for casts and divisions of whole numbers, and for a layer whose units are "
        "all inactive"
    )
    is_persistent = True  # a head that starts at zero hides the inputs at the first step

    def check(self, trial: Trial) -> Outcome:
        """Compare outputs before and after the exchange."""
        with suppress(UndecidedError):
            if name := sees_its_target(trial):
                return broken(f"outputs see {name}, with which the loss compares them: nothing else is needed", {name})
        if sentence := lost_inputs(trial):
            return broken(sentence, {"lost"})
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
        without = without or self._unused_within(trial)
        if without:
            return broken(f"no output changes if the rows exchange their {listed(without, 3)}", without)
        return holds()

    def _unused_within(self, trial: Trial) -> list[str]:
        """Return unused arguments of the networks within a model that returns its loss alone, as of diffusion."""
        if any(item.ndim for item in trial.step.outputs.values()):
            return []
        calls: list[_InnerCall] = []

        def note(module: nn.Module, inputs: Any, options: Any, output: Any) -> None:
            tensors = [item for item in (*inputs, *options.values()) if isinstance(item, Tensor)]
            of_rows = [item for item in tensors if item.ndim and len(item) == trial.rows and not is_mask(item)]
            if len(of_rows) > 1 and len(of_rows) == len(tensors) and isinstance(output, Tensor):
                calls.append(_InnerCall(module, inputs, options, of_rows, output.detach().clone()))

        with trial.eval_pass(), torch.no_grad():
            handles = [
                module.register_forward_hook(note, with_kwargs=True)
                for module in trial.model.modules()
                if module is not trial.model
            ]
            try:
                trial.step.replay(needs_loss=False)
            finally:
                for handle in handles:
                    handle.remove()
            return [name for call in calls[:MOST_CALLS] for name in call.unused()]

    def _groups(self, trial: Trial, changed: Iterable[int]) -> list[list[int]]:
        """Return the inputs one by one, but together those within a container, of which a model may use a part."""
        direct = trial.step.direct_inputs()
        alone = [[index] for index in changed if index in direct]
        nested = [index for index in changed if index not in direct]
        return [*alone, nested] if nested else alone
