"""The optimizers of a watched process whose trainings have not begun, and the event with which each one may begin."""

import os
import sys
from collections import Counter
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from ..observing import optimizers_over, wrapped_by
from .attached_loop import is_attached, parameters_of

BRIEF = 20
"""Steps that a training must exceed to be recorded, if it looks like an inner loop."""
RECORDED = 3
"""Brief trainings by optimizers of one line that are recorded; many are inner loops, as in federated learning."""
_LIBRARIES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)


class WaitingOptimizers:
    """Optimizers whose training begins with a pass over their parameters, or only with a step.

    Of several optimizers over the same parameters one waits for a pass. The others may never be used, and wait for
    their first step. The optimizer of an inner loop waits for more steps than such a loop has.
    """

    def __init__(self) -> None:
        self._places: WeakKeyDictionary[Optimizer, str] = WeakKeyDictionary()
        """The lines that have created all optimizers so far, oldest first."""
        self._brief: Counter[str] = Counter()
        """The number of brief trainings by optimizers of each line."""
        self._for_pass: WeakSet[Optimizer] = WeakSet()
        self._for_steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        """The number of steps after which a training counts."""
        self._steps: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._said: set[str] = set()

    def add(self, optimizer: Optimizer) -> None:
        """Wait for a pass over the parameters of an optimizer."""
        self._for_pass.add(optimizer)
        if optimizer not in self._places:
            self._places[optimizer] = _line_of_script()

    def add_for_step(self, optimizer: Optimizer) -> None:
        """Wait for the next step of an optimizer."""
        self._for_steps[optimizer] = 0
        self._steps.pop(optimizer, None)

    def discard(self, optimizer: Optimizer) -> None:
        """Wait no longer."""
        self._for_pass.discard(optimizer)
        self._for_steps.pop(optimizer, None)

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._for_pass or optimizer in self._for_steps

    @property
    def wait_for_passes(self) -> bool:
        """Whether a training may begin with a pass."""
        return len(self._for_pass) > 0

    @property
    def wait_for_steps(self) -> bool:
        """Whether a training may begin with a step."""
        return self.wait_for_passes or len(self._for_steps) > 0

    def note_end(self, optimizers: Iterable[Optimizer], steps: int) -> None:
        """Note the number of steps of a training that has ended."""
        if steps < BRIEF:
            self._brief.update({self._places.get(item, "") for item in optimizers})

    def begin_at_pass(self, parameters: list[Any]) -> list[Optimizer]:
        """Return the optimizers whose training begins with a pass over the parameters, unless it is delayed.

        They wait for passes no longer.
        """
        own = {id(parameter) for parameter in parameters}
        waiting = [item for item in self._for_pass if any(id(one) in own for one in parameters_of(item))]
        if not waiting:
            return []
        found = [item for item in optimizers_over(parameters) if item in self._for_pass and not is_attached(item)]
        for item in waiting:
            self._for_pass.discard(item)
            if not any(item is one for one in found) and not wrapped_by(item):
                self.add_for_step(item)
        if any(self._is_inner(item) for item in found):
            self._for_steps.update({item: BRIEF for item in found})
        return found

    def begin_at_step(self, optimizer: Optimizer) -> int:
        """Count a step; return the number of all steps of the optimizer if its training begins, and otherwise 0."""
        self._steps[optimizer] = steps = self._steps.get(optimizer, 0) + 1
        return steps if steps > self._for_steps.get(optimizer, 0) else 0

    def is_delayed(self, optimizer: Optimizer) -> bool:
        """Return whether the training of an optimizer begins after more than one step."""
        return self._for_steps.get(optimizer, 0) > 0

    def _is_inner(self, optimizer: Optimizer) -> bool:
        """Return whether a training looks like an inner loop, which is reported once."""
        line = self._places.get(optimizer, "")
        if self._brief[line] >= RECORDED:
            self._say(
                line,
                f"{RECORDED} trainings by optimizers of {line} ended before step {BRIEF}; from now on those are "
                f"recorded that exceed {BRIEF} steps.",
            )
            return True
        if self._is_of_copy(optimizer):
            self._say(
                "copy",
                f"{line} trains a copy of a model that another optimizer trains, as the inner loop of meta-learning "
                f"does; such trainings are recorded if they exceed {BRIEF} steps.",
            )
            return True
        return False

    def _is_of_copy(self, optimizer: Optimizer) -> bool:
        """Return whether the parameters are still a copy of those of an older optimizer."""
        own = parameters_of(optimizer)
        for older in [*self._places]:
            if older is optimizer:
                return False
            others = parameters_of(older)
            if len(others) == len(own) and all(map(_are_copies, own, others)):
                return True
        return False

    def _say(self, key: str, sentence: str) -> None:
        if key not in self._said:
            self._said.add(key)
            sys.stderr.write(f"loopscope watch: {sentence}\n")


def _are_copies(first: Any, second: Any) -> bool:
    """Return whether two parameters are different tensors of equal values, of a plain kind, on one device."""
    are_plain = type(first) is type(second) is nn.Parameter and first is not second
    if not are_plain or first.shape != second.shape or first.device != second.device or first.is_meta:
        return False
    return torch.equal(first.detach(), second.detach())


def _line_of_script() -> str:
    """Return the file and the line of the newest function that is not one of torch or loopscope."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
