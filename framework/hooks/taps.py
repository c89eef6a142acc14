"""Taps: functions that see, or replace, a gradient while it flows backward; others see inputs, or count."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..errors import StateMutationError, UsageError, unknown
from ..lowbit import QuantizationTap, Quantized
from ..lowbit.casts import QuantizationListener
from ..state import InternalFunction, in_bytes
from ..training import eagerly, is_compiled, quiet_graph_breaks
from .weight_uses import Around, OnGradient, around_elsewhere, around_weight

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class GradientTap:
    """A function that sees, or replaces, a gradient on its way backward, or sees a module's input on its way forward.

    Args:
        target: the name of the parameter or of the module in the model.
        kind: ``"parameter"``; ``"output"``: of a module with several outputs the first tensor; ``"weight"``: of the
            module's weight, what reaches it through this module, where several share one; ``"elsewhere"``: of the
            module's weight, what reaches it through the rest of the model; ``"input"``: no gradient, but the first
            tensor that the module is called with, detached. What is used several times in a step is seen once per use.
        function: takes the gradient; returns ``None``, or its replacement if ``replaces``.
        replaces: the tap changes the gradient; needs ``commits = {StatePart.GRADIENTS}``.
    """

    target: str
    kind: Literal["parameter", "output", "weight", "elsewhere", "input"]
    function: OnGradient
    replaces: bool = False


Tap = GradientTap | QuantizationTap


@dataclass(frozen=True)
class TapOwner:
    """What a tap set must know of the hook whose taps it attaches.

    ``is_due`` tells whether they are called on this step; ``call(target, function)`` runs one, on the hook's own
    random stream, and treats what it raises; ``may_replace`` says that the hook declares to change gradients.
    """

    hook: str
    is_due: Callable[[], bool]
    call: Callable[[str, Callable[[], Tensor | None]], Tensor | None]
    may_replace: bool


class TapSet:
    """The taps of a run: attached to the model, silenced while somebody else runs backward, removed at the end.

    A compiled model would take a tap on an output into its graphs, which could change the last bits of the run. Those
    that only read hear a pass of their own instead (:meth:`hear`); those that replace end a graph where they are.
    """

    def __init__(self, model: nn.Module, *, audit: bool = False, compiled: bool = False) -> None:
        """Make an empty set; ``audit`` compares every byte of a gradient before and after each tap.

        ``compiled`` says that the model is trained within a compiled one.
        """
        self._model = model
        self._audit = audit
        self._compiled = compiled or is_compiled(model)
        self._attached = ExitStack()
        self._switched: dict[str, _Switched] = {}
        """Hooks on modules, by the hook whose taps they serve."""
        self._apart: list[tuple[TapOwner, nn.Module, Around]] = []
        self._silent = 0
        self._hearing = False
        self._stances = ExitStack()

    def attach(self, owner: TapOwner, taps: Iterable[Tap]) -> None:
        """Attach a hook's taps; raises :class:`UsageError`, with no tap left on the model, if one cannot be."""
        try:
            for tap in taps:
                if isinstance(tap, QuantizationTap):
                    self._attach_to_quantizers(owner, tap)
                else:
                    self._attach(owner, tap)
        except BaseException:
            self.remove()
            raise

    def _attach_to_quantizers(self, owner: TapOwner, tap: QuantizationTap) -> None:
        module = _named(dict(self._model.named_modules(remove_duplicate=False)), owner, tap)
        if not isinstance(module, Quantized):
            raise UsageError(
                f"Hook {owner.hook!r} taps the quantisers of {tap.target!r}, which has none: it is a "
                f"{type(module).__name__}."
            )
        is_heard = lambda: not (self._silent or self._hearing) and owner.is_due()
        listener = QuantizationListener(is_heard, tap.counts)
        self._attached.callback(module.register_quantization_hook(listener).remove)

    def _attach(self, owner: TapOwner, tap: GradientTap) -> None:
        if tap.replaces and tap.kind == "input":
            raise UsageError(f"The tap of hook {owner.hook!r} on {tap.target!r} replaces an input, which no tap can.")
        if tap.replaces and not owner.may_replace:
            raise UsageError(
                f"The tap of hook {owner.hook!r} on {tap.target!r} replaces a gradient, which the hook does not "
                "declare; add commits = {StatePart.GRADIENTS} to its class."
            )
        # Hooks of parameters run when the graphs are done with them, so they can stay; those of modules run within.
        is_apart = self._compiled and tap.kind != "parameter" and not tap.replaces
        is_heard = lambda: not self._silent and is_apart is self._hearing and owner.is_due()
        watched = self._watched(owner, tap, is_heard)
        if tap.kind == "parameter":
            parameter = _named(dict(self._model.named_parameters(remove_duplicate=False)), owner, tap)
            _refuse_frozen(parameter, owner, tap)
            self._attached.callback(parameter.register_hook(InternalFunction(watched)).remove)  # type: ignore[no-untyped-call]
            return
        module = _named(dict(self._model.named_modules(remove_duplicate=False)), owner, tap)
        if tap.kind in ("weight", "elsewhere"):
            # Not module.weight, which may be computed from other parameters and so be no leaf.
            _refuse_frozen(module._parameters.get("weight"), owner, tap)
        if tap.kind == "elsewhere":
            self._attach_elsewhere(owner, tap, module, watched, is_heard)
            return
        make = {"output": _around_output, "weight": around_weight, "input": _around_input}[tap.kind]
        around = make(watched, is_heard)
        if is_apart:
            self._apart.append((owner, module, around))
        elif self._compiled and tap.kind == "weight":
            self._attached.enter_context(quiet_graph_breaks())
            self._attached.enter_context(_uncompiled_forward(module, around))
        elif self._compiled:
            self._attached.callback(module.register_forward_hook(_uncompiled_hook()(around[1])).remove)
        else:
            self._listen(owner, module, around)

    def _listen(self, owner: TapOwner, module: nn.Module, around: Around) -> None:
        """Attach hooks to a module which :meth:`arrange` may take off for a while."""
        if owner.hook not in self._switched:
            self._switched[owner.hook] = _Switched(owner.is_due)
        self._switched[owner.hook].listen(module, around)

    def arrange(self) -> None:
        """Keep hooks on modules at those steps only at which they are due; called before the passes of a step.

        A module without any is called faster.
        """
        for around in self._switched.values():
            around.arrange()

    def _attach_elsewhere(
        self, owner: TapOwner, tap: GradientTap, module: nn.Module, watched: OnGradient, is_heard: Callable[[], bool]
    ) -> None:
        """Listen in the whole model, and around the module to know what of that is its own."""
        if self._compiled and tap.replaces:
            raise UsageError(
                f"Hook {owner.hook!r} taps uses of {tap.target}.weight that are no module's, which a compiled model "
                "hides; make the head a module (an nn.Linear that is given the weight), or train without compiling."
            )
        inner, outer = around_elsewhere(watched, is_heard, module)
        for place, around in ((module, inner), (self._model, outer)):
            if self._compiled:
                self._apart.append((owner, place, around))
            else:
                self._listen(owner, place, around)

    def _watched(self, owner: TapOwner, tap: GradientTap, is_heard: Callable[[], bool]) -> OnGradient:
        def on_gradient(gradient: Tensor) -> Tensor | None:
            if not is_heard():
                return None
            before = _mark(gradient)
            copy = gradient.clone() if self._audit else None
            replacement: Tensor | None = None
            self._silent += 1  # the function may differentiate on its own
            try:
                replacement = owner.call(tap.target, lambda: _fitting(tap.function(gradient), gradient))
            finally:
                self._silent -= 1
                same = _mark(gradient) == before and (copy is None or _same_bytes(copy, gradient))
                if not same or (replacement is not None and not tap.replaces):
                    what = "an input" if tap.kind == "input" else "a gradient"
                    raise StateMutationError(
                        f"The tap of hook {owner.hook!r} on {tap.target!r} changed {what} that it may only read; "
                        "declare replaces=True and commits = {StatePart.GRADIENTS}, and return the new gradient."
                    )
            return replacement

        return on_gradient

    def silenced(self) -> "TapSet":
        """Call no tap in the body (``with taps.silenced():``): the passes in it are not the run's own.

        Compiled modules run eagerly there: compiling them for other shapes or modes may change what the run is given.
        """
        return self  # entered at every call of a hook, where a context manager made of a generator would show

    def __enter__(self) -> None:
        self._silent += 1
        if self._compiled:
            self._stances.enter_context(eagerly())

    def __exit__(self, *error: object) -> None:
        self._silent -= 1
        # Silenced bodies may nest: only the end of the outermost lets compiled code run again.
        if self._compiled and not self._silent:
            self._stances.close()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """Call no tap in the body, a further pass of the run's own, which runs compiled where the model is."""
        self._silent += 1
        try:
            yield
        finally:
            self._silent -= 1

    @property
    def apart(self) -> set[str]:
        """The names of the hooks with a tap that a compiled pass cannot serve."""
        return {owner.hook for owner, _, _ in self._apart}

    @property
    def need_a_pass(self) -> bool:
        """Whether a tap is due now that a compiled pass cannot serve."""
        return bool(self._apart) and any(owner.is_due() for owner, _, _ in self._apart)

    def hear(self, compute_gradients: Callable[[], object]) -> None:
        """Run a pass eagerly, heard by the taps that a compiled pass cannot serve and by no others."""
        self._hearing = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_hearing", False)
            stack.enter_context(eagerly())
            for _, module, around in self._apart:
                _listen(stack, module, around)
            compute_gradients()

    def remove(self) -> None:
        """Take every tap off the model."""
        self._attached.close()
        for around in self._switched.values():
            around.close()
        self._switched.clear()
        self._apart.clear()


def _uncompiled(function: Callable[..., Any]) -> Any:
    """Return a function that ends the graph of a compiled model where it is called."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


@cache
def _uncompiled_hook() -> type[InternalFunction]:
    """Return a class of hooks that end the graph of a compiled model; made late, since this imports torch's compiler.

    Its call itself must be kept out of graphs: torch would compile one that only calls an uncompiled function.
    """
    return type("UncompiledHook", (InternalFunction,), {"__call__": _uncompiled(InternalFunction.__call__)})


@contextmanager
def _uncompiled_forward(module: nn.Module, around: Around) -> Iterator[None]:
    """Keep a module's forward, whose nodes are tapped, out of the graphs of a compiled model in the body.

    Its forward is exchanged, since a hook of the module could only end the graph before and after it.
    """
    before, after = around
    forward, own = module.forward, vars(module).get("forward")

    def eagerly_tapped(*inputs: Any, **options: Any) -> Any:
        if before is not None:
            before(module, inputs)
        output = forward(*inputs, **options)
        after(module, inputs, output)
        return output

    # As an instance attribute, which hides the method of the class until it is removed.
    module.forward = _uncompiled(eagerly_tapped)
    try:
        yield
    finally:
        vars(module).pop("forward")
        vars(module).update({} if own is None else {"forward": own})


class _Switched:
    """What is called around the forward passes of some modules, where a hook is due."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._places: list[tuple[nn.Module, Around]] = []
        self._attached = ExitStack()
        self._is_on = True

    def listen(self, module: nn.Module, around: Around) -> None:
        self._places.append((module, around))
        _listen(self._attached, module, around)

    def arrange(self) -> None:
        if self._is_due() is self._is_on:
            return
        self._is_on = not self._is_on
        self._attached.close()
        for module, around in self._places if self._is_on else ():
            _listen(self._attached, module, around)

    def close(self) -> None:
        self._attached.close()


def _listen(stack: ExitStack, module: nn.Module, around: Around) -> None:
    """Have functions called around a module's forward until the stack is closed."""
    before, after = around
    if before is not None:
        stack.callback(module.register_forward_pre_hook(InternalFunction(before)).remove)
    stack.callback(module.register_forward_hook(InternalFunction(after)).remove)


def _around_output(on_gradient: OnGradient, is_heard: Callable[[], bool]) -> Around:
    """Listen to the gradient of the first tensor that a module returns."""

    def after(module: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        if not is_heard():  # asked first, as taps mostly are not: their hooks are due at some steps only
            return
        first = next((leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.requires_grad:
            # A hook on an output goes with the graph of this pass, so there is nothing to remove.
            first.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    return None, after


def _around_input(on_input: OnGradient, is_heard: Callable[[], bool]) -> Around:
    """Look at the first tensor that a module is called with, in passes that are differentiated."""

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if not (torch.is_grad_enabled() and is_heard()):
            return
        first = next((leaf for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)), None)
        if first is not None:
            with torch.no_grad():
                on_input(first.detach())

    return before, lambda module, inputs, output: None


def _refuse_frozen(parameter: Tensor | None, owner: TapOwner, tap: GradientTap) -> None:
    """Raise :class:`UsageError` for a parameter that has no gradient, or that is not there."""
    if parameter is None:
        raise UsageError(f"Hook {owner.hook!r} taps the weight of {tap.target!r}, which has none.")
    if not parameter.requires_grad:
        raise UsageError(f"Hook {owner.hook!r} taps {tap.target!r}, which has no gradient: it is frozen.")


def _mark(gradient: Tensor) -> tuple[int, int, torch.Size]:
    # The counter tells of writes in place, the address of an exchange by ``.data`` or ``set_``. Neither copies anything
    # nor waits for a device. What is written through ``.data`` itself leaves them alone; only an audit sees that.
    return gradient._version, gradient.data_ptr(), gradient.shape


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    raw_a, raw_b = (in_bytes(tensor) for tensor in (a, b))
    return torch.equal(raw_a, raw_b)


def _fitting(replacement: Tensor | None, gradient: Tensor) -> Tensor | None:
    """Return a replacement that can take the gradient's place; raises ``ValueError`` for any other."""
    if replacement is None or (replacement.shape == gradient.shape and replacement.dtype == gradient.dtype):
        return replacement
    raise ValueError(
        f"returned {replacement.dtype} of shape {tuple(replacement.shape)} in place of a gradient of {gradient.dtype} "
        f"and shape {tuple(gradient.shape)}"
    )


def _named(things: dict[str, Thing], owner: TapOwner, tap: Tap) -> Thing:
    if tap.target not in things:
        kind = "parameter" if isinstance(tap, GradientTap) and tap.kind == "parameter" else "module"
        raise UsageError(f"Hook {owner.hook!r} taps what the model does not have: {unknown(kind, tap.target, things)}")
    return things[tap.target]
