"""Gradient taps: functions that see, or replace, a gradient while it flows backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from framework.errors import StateMutationError, UsageError, unknown

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class GradientTap:
    """A function on one gradient: of a parameter, or of the output of a module, by its name in the model.

    Args:
        target: the name of the parameter or of the module.
        kind: ``"parameter"`` or ``"output"``.
        function: takes the gradient; returns ``None``, or its replacement if ``replaces``.
        replaces: the tap changes the gradient; needs ``commits = {StatePart.GRADIENTS}``.
    """

    target: str
    kind: Literal["parameter", "output"]
    function: Callable[[Tensor], Tensor | None]
    replaces: bool = False


class TapSet:
    """The taps of a run: attached to the model, silenced while somebody else runs backward, removed at the end."""

    def __init__(self, model: nn.Module, call: Callable[[str, Callable[[], Tensor | None]], Tensor | None]) -> None:
        """Make an empty set; ``call(hook_name, function)`` runs a tap on the hook's own random stream."""
        self._model = model
        self._call = call
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._silent = 0

    def attach(self, hook: str, taps: Iterable[GradientTap], is_due: Callable[[], bool]) -> None:
        """Attach a hook's taps; they are called on the steps for which ``is_due`` says so."""
        for tap in taps:
            watched = self._watched(hook, tap, is_due)
            if tap.kind == "parameter":
                parameter = _named(dict(self._model.named_parameters()), hook, tap)
                self._handles.append(parameter.register_hook(watched))
            else:
                module = _named(dict(self._model.named_modules()), hook, tap)
                self._handles.append(module.register_forward_hook(self._on_output(watched, is_due)))

    def _on_output(self, watched: Callable[[Tensor], Tensor | None], is_due: Callable[[], bool]) -> Callable[..., None]:
        def after_forward(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
            if not self._silent and is_due() and output.requires_grad:
                output.register_hook(watched)

        return after_forward

    def _watched(self, hook: str, tap: GradientTap, is_due: Callable[[], bool]) -> Callable[[Tensor], Tensor | None]:
        def on_gradient(gradient: Tensor) -> Tensor | None:
            if self._silent or not is_due():
                return None
            version = gradient._version
            replacement = self._call(hook, lambda: tap.function(gradient))
            if gradient._version != version or (replacement is not None and not tap.replaces):
                raise StateMutationError(
                    f"The tap of hook {hook!r} on {tap.target!r} changed a gradient that it may only read; "
                    "declare it with replaces=True and commits = {StatePart.GRADIENTS}, and return the new gradient."
                )
            return replacement

        return on_gradient

    def silence(self) -> "TapSet":
        """Use as ``with taps.silence():`` around a forward and backward that is not the run's own."""
        return self

    def __enter__(self) -> None:
        self._silent += 1

    def __exit__(self, *error: object) -> None:
        self._silent -= 1

    def remove(self) -> None:
        """Take every tap off the model."""
        while self._handles:
            self._handles.pop().remove()


def _named(things: dict[str, Thing], hook: str, tap: GradientTap) -> Thing:
    if tap.target not in things:
        raise UsageError(f"Hook {hook!r} taps what the model does not have: {unknown(tap.kind, tap.target, things)}")
    return things[tap.target]
