"""The set of a run's taps: attachment to the model, checks of their calls, and removal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..errors import StateMutationError, UsageError, unknown
from ..hooks import GradientTap, OnGradient, QuantizationTap, Quantized, Tap, TapOwner
from ..state import InternalFunction
from ..tensors import in_bytes
from ..training import eagerly, is_compiled, quiet_graph_breaks
from .weight_uses import ForwardCallbacks, elsewhere_callbacks, weight_callbacks

Target = TypeVar("Target")


class TapSet:
    """The taps of a run: attached to the model, disabled during passes of hooks, removed at the end.

    torch.compile would trace taps on modules into the graphs of a compiled model, which can change the last bits of the
    run. Taps that only read therefore receive a separate eager pass (:meth:`run_separate_pass`); taps that replace
    gradients break the graph at their module.
    """

    def __init__(self, model: nn.Module, *, audit: bool = False, compiled: bool = False) -> None:
        """Create an empty set; ``audit`` compares every byte of a gradient before and after each tap.

        ``compiled`` is set if the model is part of a compiled module that is trained.
        """
        self._model = model
        self._audit = audit
        self._compiled = compiled or is_compiled(model)
        self._attached = ExitStack()
        self._switchable: dict[str, _SwitchableHooks] = {}
        """Callbacks on modules, by the name of the hook that owns the taps."""
        self._separate: list[tuple[TapOwner, nn.Module, ForwardCallbacks]] = []
        self._disabled_depth = 0
        self._in_separate_pass = False
        self.is_idle = not self._compiled
        """Whether :meth:`disabled` has no effect: no tap was attached, and the model is not compiled."""
        self._stances = ExitStack()

    def attach(self, owner: TapOwner, taps: Iterable[Tap]) -> None:
        """Attach a hook's taps.

        Raises:
            UsageError: a tap cannot be attached; all taps are then removed from the model.
        """
        try:
            for tap in taps:
                self.is_idle = False
                if isinstance(tap, QuantizationTap):
                    self._attach_to_quantizers(owner, tap)
                else:
                    self._attach(owner, tap)
        except BaseException:
            self.remove()
            raise

    def _attach_to_quantizers(self, owner: TapOwner, tap: QuantizationTap) -> None:
        module = _target_of(dict(self._model.named_modules(remove_duplicate=False)), owner, tap)
        if not isinstance(module, Quantized):
            raise UsageError(
                f"Hook {owner.hook!r} taps the quantisers of {tap.target!r}, which has none; it is a "
                f"{type(module).__name__}."
            )

        def is_active() -> bool:
            return not (self._disabled_depth or self._in_separate_pass) and owner.is_due()

        self._attached.callback(module.count_quantizations(is_active, tap.counts).remove)

    def _attach(self, owner: TapOwner, tap: GradientTap) -> None:
        if tap.replaces and tap.kind == "input":
            raise UsageError(
                f"The tap of hook {owner.hook!r} on {tap.target!r} replaces an input; taps can only replace gradients."
            )
        if tap.replaces and not owner.may_replace:
            raise UsageError(
                f"The tap of hook {owner.hook!r} on {tap.target!r} replaces a gradient, which the hook does not "
                "declare; add commits = {StatePart.GRADIENTS} to its class."
            )
        # Parameter hooks run outside of compiled graphs, module hooks run inside them.
        is_separate = self._compiled and tap.kind != "parameter" and not tap.replaces

        def is_active() -> bool:
            return not self._disabled_depth and is_separate is self._in_separate_pass and owner.is_due()

        checked = self._checked(owner, tap, is_active)
        if tap.kind == "parameter":
            parameter = _target_of(dict(self._model.named_parameters(remove_duplicate=False)), owner, tap)
            _require_trainable(parameter, owner, tap)
            self._attached.callback(parameter.register_hook(InternalFunction(checked)).remove)  # type: ignore[no-untyped-call]
            return
        module = _target_of(dict(self._model.named_modules(remove_duplicate=False)), owner, tap)
        if tap.kind in ("weight", "elsewhere"):
            # Not module.weight: a parametrization may compute it from other parameters, so it need not be a leaf.
            _require_trainable(module._parameters.get("weight"), owner, tap)
        if tap.kind == "elsewhere":
            self._attach_elsewhere(owner, tap, module, checked, is_active)
            return
        make_callbacks = {"output": _output_callbacks, "weight": weight_callbacks, "input": _input_callbacks}[tap.kind]
        callbacks = make_callbacks(checked, is_active)
        if is_separate:
            self._separate.append((owner, module, callbacks))
        elif self._compiled and tap.kind == "weight":
            self._attached.enter_context(quiet_graph_breaks())
            self._attached.enter_context(_uncompiled_forward(module, callbacks))
        elif self._compiled and (after := callbacks[1]) is not None:
            self._attached.callback(module.register_forward_hook(_uncompiled_hook()(after)).remove)
        else:
            self._attach_switchable(owner, module, callbacks)

    def _attach_switchable(self, owner: TapOwner, module: nn.Module, callbacks: ForwardCallbacks) -> None:
        """Attach callbacks to a module, which :meth:`arrange` can remove for some steps."""
        if owner.hook not in self._switchable:
            self._switchable[owner.hook] = _SwitchableHooks(owner.is_due)
        self._switchable[owner.hook].add(module, callbacks)

    def arrange(self) -> None:
        """Attach module callbacks for steps on which they are due, and remove them otherwise; called before each step.

        PyTorch calls modules without hooks faster.
        """
        for hooks in self._switchable.values():
            hooks.arrange()

    def _attach_elsewhere(
        self, owner: TapOwner, tap: GradientTap, module: nn.Module, checked: OnGradient, is_active: Callable[[], bool]
    ) -> None:
        """Attach callbacks to the whole model, and to the module, in order to exclude the module's own uses."""
        if self._compiled and tap.replaces:
            raise UsageError(
                f"Hook {owner.hook!r} taps uses of {tap.target}.weight outside of modules, which a compiled model "
                "hides; make the head a module (an nn.Linear with this weight), or train without compiling."
            )
        inner, outer = elsewhere_callbacks(checked, is_active, module)
        for tapped, callbacks in ((module, inner), (self._model, outer)):
            if self._compiled:
                self._separate.append((owner, tapped, callbacks))
            else:
                self._attach_switchable(owner, tapped, callbacks)

    def _checked(self, owner: TapOwner, tap: GradientTap, is_active: Callable[[], bool]) -> OnGradient:
        def on_gradient(gradient: Tensor) -> Tensor | None:
            if not is_active():
                return None
            version = _version_of(gradient)
            copy = gradient.clone() if self._audit else None
            replacement: Tensor | None = None
            self._disabled_depth += 1  # the function may run a backward pass itself
            try:
                replacement = owner.call(tap.target, partial(_replacement_of, tap, gradient))
            finally:
                self._disabled_depth -= 1
                is_same = _version_of(gradient) == version
                if copy is not None:
                    is_same = is_same and torch.equal(in_bytes(copy), in_bytes(gradient))
                if not is_same or (replacement is not None and not tap.replaces):
                    tensor = "an input" if tap.kind == "input" else "a gradient"
                    raise StateMutationError(
                        f"The tap of hook {owner.hook!r} on {tap.target!r} changed {tensor} that it may only read; "
                        "declare replaces=True and commits = {StatePart.GRADIENTS}, and return the new gradient."
                    )
            return replacement

        return on_gradient

    def disabled(self) -> "TapSet":
        """Disable all taps in the body (``with taps.disabled():``), for passes that are not the run's own.

        Compiled modules run eagerly there: compiling them for other shapes or modes may change the run's results.
        """
        return self  # entered at every hook call, where the cost of a generator-based context manager is noticeable

    def __enter__(self) -> None:
        self._disabled_depth += 1
        if self._compiled:
            self._stances.enter_context(eagerly())

    def __exit__(self, *error: object) -> None:
        self._disabled_depth -= 1
        # Bodies may nest: only the outermost one re-enables compiled code.
        if self._compiled and not self._disabled_depth:
            self._stances.close()

    @contextmanager
    def untapped_pass(self) -> Iterator[None]:
        """Disable all taps in the body, an additional pass of the run, which stays compiled if the model is."""
        self._disabled_depth += 1
        try:
            yield
        finally:
            self._disabled_depth -= 1

    @property
    def hooks_with_separate_pass(self) -> set[str]:
        """Names of the hooks with a tap that does not work in a compiled pass."""
        return {owner.hook for owner, _, _ in self._separate}

    @property
    def needs_separate_pass(self) -> bool:
        """Whether a tap is due now that does not work in a compiled pass."""
        return bool(self._separate) and any(owner.is_due() for owner, _, _ in self._separate)

    def run_separate_pass(self, compute_gradients: Callable[[], object]) -> None:
        """Run an eager pass for exactly those taps that do not work in a compiled pass."""
        self._in_separate_pass = True
        with ExitStack() as stack:
            stack.callback(setattr, self, "_in_separate_pass", False)
            stack.enter_context(eagerly())
            for _, module, callbacks in self._separate:
                _attach_callbacks(stack, module, callbacks)
            compute_gradients()

    def remove(self) -> None:
        """Remove all taps from the model."""
        self._attached.close()
        for hooks in self._switchable.values():
            hooks.close()
        self._switchable.clear()
        self._separate.clear()


def _uncompiled(function: Callable[..., Any]) -> Any:
    """Return a wrapper of a function that breaks the graph of a compiled model where it is called."""
    return torch.compiler.disable(function)  # type: ignore[no-untyped-call]


@cache
def _uncompiled_hook() -> type[InternalFunction]:
    """Return a class of module hooks that break the graph of a compiled model.

    It is created at first use, because this imports torch's compiler. ``__call__`` itself must be excluded from graphs:
    torch compiles a function that only calls an excluded one.
    """
    return type("UncompiledHook", (InternalFunction,), {"__call__": _uncompiled(InternalFunction.__call__)})


@contextmanager
def _uncompiled_forward(module: nn.Module, callbacks: ForwardCallbacks) -> Iterator[None]:
    """Exclude a module's forward, whose graph nodes are tapped, from the graphs of a compiled model in the body.

    The forward method is replaced, because a module hook can break the graph only before and after it.
    """
    before, after = callbacks
    forward, instance_forward = module.forward, vars(module).get("forward")

    def tapped_forward(*inputs: Any, **options: Any) -> Any:
        if before is not None:
            before(module, inputs)
        output = forward(*inputs, **options)
        if after is not None:
            after(module, inputs, output)
        return output

    # An instance attribute hides the method of the class until it is removed.
    module.forward = _uncompiled(tapped_forward)
    try:
        yield
    finally:
        vars(module).pop("forward")
        vars(module).update({} if instance_forward is None else {"forward": instance_forward})


class _SwitchableHooks:
    """Callbacks around the forward passes of modules, attached only while their hook is due."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self._is_due = is_due
        self._places: list[tuple[nn.Module, ForwardCallbacks]] = []
        self._attached = ExitStack()
        self._is_on = True

    def add(self, module: nn.Module, callbacks: ForwardCallbacks) -> None:
        self._places.append((module, callbacks))
        _attach_callbacks(self._attached, module, callbacks)

    def arrange(self) -> None:
        if self._is_due() is self._is_on:
            return
        self._is_on = not self._is_on
        self._attached.close()
        for module, callbacks in self._places if self._is_on else ():
            _attach_callbacks(self._attached, module, callbacks)

    def close(self) -> None:
        self._attached.close()


def _attach_callbacks(stack: ExitStack, module: nn.Module, callbacks: ForwardCallbacks) -> None:
    """Call functions before and after a module's forward until the stack is closed."""
    before, after = callbacks
    if before is not None:
        stack.callback(module.register_forward_pre_hook(InternalFunction(before)).remove)
    if after is not None:
        stack.callback(module.register_forward_hook(InternalFunction(after)).remove)


def _output_callbacks(on_gradient: OnGradient, is_active: Callable[[], bool]) -> ForwardCallbacks:
    """Return callbacks that tap the gradient of a module's first output tensor."""

    def after(module: nn.Module, inputs: tuple[object, ...], output: Any) -> None:
        if not is_active():  # checked first: most hooks are due on few steps
            return
        # The tensor is tapped, not the module: full-backward module hooks cost 6 ms of an 85 ms step, and fail for
        # modules that work in place.
        first = next((leaf for leaf in tree_iter(output) if isinstance(leaf, Tensor)), None)
        if first is not None and first.requires_grad:
            # The hook belongs to this pass's graph and disappears with it.
            first.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    return None, after


def _input_callbacks(on_input: OnGradient, is_active: Callable[[], bool]) -> ForwardCallbacks:
    """Return callbacks that tap a module's first input tensor, in passes with gradients."""

    def before(module: nn.Module, inputs: tuple[object, ...]) -> None:
        if not (torch.is_grad_enabled() and is_active()):
            return
        first = next((leaf for leaf in tree_iter(inputs) if isinstance(leaf, Tensor)), None)
        if first is not None:
            with torch.no_grad():
                on_input(first.detach())

    return before, None


def _require_trainable(parameter: Tensor | None, owner: TapOwner, tap: GradientTap) -> None:
    """Raise :class:`UsageError` for a missing or frozen parameter."""
    if parameter is None:
        raise UsageError(f"Hook {owner.hook!r} taps the weight of {tap.target!r}, which has no weight.")
    if not parameter.requires_grad:
        raise UsageError(f"Hook {owner.hook!r} taps {tap.target!r}, which has no gradient because it is frozen.")


def _version_of(gradient: Tensor) -> tuple[int, int, torch.Size]:
    # Detects in-place writes by the version counter, and assignment to ``.data`` or ``set_`` by the address, without a
    # copy or a device synchronisation. Writes through ``.data`` change neither; only an audit detects them.
    return gradient._version, gradient.data_ptr(), gradient.shape


def _replacement_of(tap: GradientTap, gradient: Tensor) -> Tensor | None:
    """Call a tap and return its replacement; raise ``ValueError`` unless shape and dtype equal the gradient's."""
    replacement = tap.function(gradient)
    if replacement is None or (replacement.shape == gradient.shape and replacement.dtype == gradient.dtype):
        return replacement
    raise ValueError(
        f"returned {replacement.dtype} of shape {tuple(replacement.shape)} as replacement of a gradient of "
        f"{gradient.dtype} and shape {tuple(gradient.shape)}; return the same dtype and shape"
    )


def _target_of(candidates: dict[str, Target], owner: TapOwner, tap: Tap) -> Target:
    if tap.target not in candidates:
        kind = "parameter" if isinstance(tap, GradientTap) and tap.kind == "parameter" else "module"
        raise UsageError(f"Hook {owner.hook!r} has a tap without a target: {unknown(kind, tap.target, candidates)}")
    return candidates[tap.target]
