"""Steps of optimizers that are not attached, over the parameters of the attached model."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..isolation import VISITS
from ..state import Transient
from .attached_loop import is_attached


class OtherOptimizers(Transient):
    """Reports the first step of another optimizer that trains a parameter of the model.

    It uses a hook of all optimizers, which every step in the process calls: it exists only from the moment when a step
    may have been missed, until the first report.
    """

    def __init__(
        self,
        model: nn.Module,
        own: Sequence[Optimizer],
        is_in_hook: Callable[[], bool],
        report: Callable[[Optimizer], None],
    ) -> None:
        self._model, self._own, self._is_in_hook, self._report = model, own, is_in_hook, report
        self._handle: Any = None
        self.have_stepped = False
        """Whether a step was reported."""

    def watch(self) -> None:
        """Watch the steps from now on; further calls do nothing."""
        if self._handle is None:
            with VISITS:
                self._handle = register_optimizer_step_post_hook(self)

    def stop(self) -> None:
        """Stop watching."""
        if self._handle is not None:
            with VISITS:
                self._handle.remove()

    def __call__(self, optimizer: Optimizer, inputs: Any, options: Any) -> None:
        """Report the step of another optimizer: torch calls this after every step."""
        if self._is_in_hook() or is_attached(optimizer):  # here, or with a record of its own
            return
        # A wrapper around an attached optimizer steps that one as well.
        wrapped = {id(value) for value in vars(optimizer).values()}
        if any(id(item) in wrapped for item in self._own):
            return
        parameters = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"]):
            self.have_stepped = True
            self.stop()
            self._report(optimizer)
