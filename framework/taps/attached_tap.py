"""One tap of a hook on a parameter or on modules: its callbacks, and whether they are on the model now."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import UsageError, unknown
from ..hooks import AttentionTap, ForwardTap, GradientTap, QuantizationTap, Quantized, StepTap, Tap, TapOwner
from ..state import FunctionBeforeForward, InternalFunction
from .attention_tap import attention_callback, attention_read
from .callbacks import FORWARD_TENSORS, ForwardCallbacks, input_callbacks, output_callbacks
from .checked_function import checked_function
from .compiled_sites import ELSEWHERE, EXCLUDED, SiteTap
from .compiled_traces import tapped_in_graphs
from .forward_calls import forward_function
from .passes import RunningPasses, is_training_use
from .scripted_modules import leave_taps_out_of_scripts
from .weight_uses import elsewhere_callbacks, weight_callbacks

Target = TypeVar("Target")
Registration = Callable[[], AbstractContextManager[Any]]
"""Puts a callback on the model and returns a context whose end removes it, such as torch's ``RemovableHandle``."""

_MODULE_CALLBACKS = {"output": output_callbacks, "weight": weight_callbacks, "input": input_callbacks}
"""By the kind of tap, the function that makes the callbacks around the forward pass of its module."""


_tracing_state: Callable[[], Any] = torch._C._get_tracing_state  # what torch.jit.is_tracing() calls


class AttachedTap:
    """One tap of a hook with its state; :meth:`attach` puts its callbacks on the model.

    A tap on a module has callbacks for eager passes, which do nothing in graphs of torch.compile, and an operation for
    these graphs (:func:`.tapped_in_graphs`), which does nothing in eager passes.

    Raises:
        UsageError: the tap does not fit the model or its hook.
    """

    def __init__(self, owner: TapOwner, tap: Tap, model: nn.Module, passes: RunningPasses, *, compiled: bool) -> None:
        self.owner = owner
        self._passes = passes
        self._target = tap.target
        self._attached = ExitStack()
        self._in_graphs = ExitStack()
        self._site_taps: list[tuple[nn.Module, str, SiteTap]] = []
        is_of_parameter = isinstance(tap, GradientTap) and tap.kind == "parameter"
        is_permanent = isinstance(tap, QuantizationTap) or is_of_parameter or (isinstance(tap, StepTap) and tap.always)
        self.is_attached: bool | None = None if is_permanent else True
        """Whether the callbacks are on the model, since the hook is due on this step; ``None`` if they always are."""
        if isinstance(tap, QuantizationTap):
            self._registrations = self._on_quantizers(tap, model)
        elif isinstance(tap, StepTap):
            is_active = self._is_own_pass if tap.always else self.is_active
            self._registrations = [partial(tap.recorder.recording, model, is_active)]
        elif isinstance(tap, ForwardTap):
            module = _target_of(dict(model.named_modules(remove_duplicate=False)), owner, tap)
            on_call = forward_function(owner, tap, self.is_active, passes)
            self._registrations = [partial(_after_forward, module, on_call)]
            self._tap_graphs(module, "forward", on_call)
        elif isinstance(tap, AttentionTap):
            module = _target_of(dict(model.named_modules(remove_duplicate=False)), owner, tap)
            on_attention = attention_callback(owner, tap, passes)
            self._registrations = [partial(attention_read, module, on_attention, self.is_active)]
            self._tap_graphs(module, "attention", on_attention)
        else:
            self._registrations = self._on_tensors(tap, model, compiled=compiled)

    def _tap_graphs(
        self, module: nn.Module, kind: str, function: Callable[..., Any], *, replaces: bool = False
    ) -> None:
        """Call a function of the tap in graphs of torch.compile, too."""
        name = "" if kind.startswith(ELSEWHERE) else self._target
        self._site_taps.append((module, name, SiteTap(kind, self.is_active, function, replaces)))

    @property
    def is_in_graph(self) -> bool:
        """Whether a graph of torch.compile has called the tap."""
        return any(tap.is_in_graph for _, _, tap in self._site_taps)

    @property
    def labels(self) -> set[str]:
        """The labels of its modules in graphs of torch.compile."""
        sites = [vars(module).get("_site_in_graphs") for module, _, _ in self._site_taps]
        return {site.label for site in sites if site is not None}

    def leave_graphs(self) -> None:
        """Remain outside of graphs from now on."""
        self._site_taps.clear()
        self._in_graphs.close()

    def _on_quantizers(self, tap: QuantizationTap, model: nn.Module) -> list[Registration]:
        module = _target_of(dict(model.named_modules(remove_duplicate=False)), self.owner, tap)
        if not isinstance(module, Quantized):
            raise UsageError(
                f"Hook {self.owner.hook!r} taps the quantisers of {tap.target!r}, which has none; it is a "
                f"{type(module).__name__}."
            )
        return [partial(module.count_quantizations, self.is_active, tap.counts)]

    def _on_tensors(self, tap: GradientTap, model: nn.Module, *, compiled: bool) -> list[Registration]:
        owner = self.owner
        on_tensor = checked_function(owner, tap, self.is_active, self._passes)
        _require_permission(owner, tap)
        if tap.kind == "parameter":
            parameter = _target_of(dict(model.named_parameters(remove_duplicate=False)), owner, tap)
            _require_trainable(parameter, owner, tap)
            return [partial(parameter.register_hook, InternalFunction(on_tensor))]
        module = _target_of(dict(model.named_modules(remove_duplicate=False)), owner, tap)
        if tap.kind in ("weight", "elsewhere"):
            # Not module.weight: a parametrization may compute it from other parameters, so it need not be a leaf.
            _require_trainable(module._parameters.get("weight"), owner, tap)
        if tap.kind == "elsewhere":
            if compiled:  # the nodes of compiled parts hide which modules use the weight
                raise UsageError(
                    f"Hook {owner.hook!r} taps uses of {tap.target}.weight outside of modules, which modules that are "
                    "compiled one by one hide; make the head a module (an nn.Linear with this weight), compile the "
                    "whole model, or train without compiling."
                )
            # The callbacks of the module exclude its own uses from those of the whole model.
            inner, outer = elsewhere_callbacks(on_tensor, self.is_active, module)
            self._tap_graphs(module, EXCLUDED, on_tensor)
            self._tap_graphs(model, ELSEWHERE + tap.target, on_tensor, replaces=tap.replaces)
            return [*_around(module, inner), *_around(model, outer, FunctionBeforeForward)]
        callbacks = _MODULE_CALLBACKS[tap.kind](on_tensor, self.is_active)
        self._tap_graphs(module, tap.kind, on_tensor, replaces=tap.replaces)
        return _around(module, callbacks)

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttachedTap":
        # A hook may copy the model with its module hooks, and these refer to taps; a tap refers to the whole run.
        return self

    def is_active(self) -> bool:
        """Return whether the tap is called in the innermost running pass."""
        passes = self._passes
        if passes.others:
            return False
        passes.have_called_taps = True
        # A pass that torch.jit.trace records belongs to an export, and would contain the operations of the tap.
        return self.owner.is_due() and _tracing_state() is None

    def _is_own_pass(self) -> bool:
        return not self._passes.others

    def attach(self) -> None:
        """Put the callbacks on the model."""
        leave_taps_out_of_scripts()
        for register in self._registrations:
            self._attached.enter_context(register())
        for module, name, tap in self._site_taps:
            self._in_graphs.enter_context(tapped_in_graphs(module, name, tap))

    def detach(self) -> None:
        """Remove the callbacks from the model."""
        self._attached.close()
        self._in_graphs.close()

    def switch(self) -> None:
        """Detach the callbacks, or attach them again."""
        self.is_attached = not self.is_attached
        if self.is_attached:
            self.attach()
        else:
            self.detach()


def _after_forward(module: nn.Module, on_call: Callable[[tuple[Any, ...]], None]) -> AbstractContextManager[Any]:
    """Call a function after forward passes of a module that belong to the training."""

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if is_training_use():
            on_call((args, kwargs, output))

    hook = InternalFunction(after)
    handle = module.register_forward_hook(hook, with_kwargs=True)
    # Private: torch only looks up whether the key is in this table, whose values are True (torch 2.9 to 2.15). The
    # value here marks the entry as internal, so that digests omit it as they omit the hook.
    module._forward_hooks_with_kwargs[handle.id] = hook  # type: ignore[assignment]
    return handle


def _around(
    module: nn.Module, callbacks: ForwardCallbacks, kind_before: type[InternalFunction] = InternalFunction
) -> list[Registration]:
    """Return the registrations of functions before and after a module's forward."""
    before, after = callbacks
    registrations: list[Registration] = []
    if before is not None:
        registrations.append(partial(module.register_forward_pre_hook, kind_before(before)))
    if after is not None:
        registrations.append(partial(module.register_forward_hook, InternalFunction(after)))
    return registrations


def _require_permission(owner: TapOwner, tap: GradientTap) -> None:
    """Raise :class:`UsageError` if the tap replaces a tensor of the forward pass, or a gradient undeclared."""
    if tap.replaces and tap.kind in FORWARD_TENSORS:
        raise UsageError(
            f"The tap of hook {owner.hook!r} on {tap.target!r} replaces {FORWARD_TENSORS[tap.kind]}; taps can only "
            "replace gradients."
        )
    if tap.replaces and not owner.may_replace:
        raise UsageError(
            f"The tap of hook {owner.hook!r} on {tap.target!r} replaces a gradient, which the hook does not "
            "declare; add commits = {StatePart.GRADIENTS} to its class."
        )


def _require_trainable(parameter: Tensor | None, owner: TapOwner, tap: GradientTap) -> None:
    """Raise :class:`UsageError` for a missing or frozen parameter."""
    if parameter is None:
        raise UsageError(f"Hook {owner.hook!r} taps the weight of {tap.target!r}, which has no weight.")
    if not parameter.requires_grad:
        raise UsageError(f"Hook {owner.hook!r} taps {tap.target!r}, which has no gradient because it is frozen.")


def _target_of(candidates: dict[str, Target], owner: TapOwner, tap: Tap) -> Target:
    if tap.target not in candidates:
        kind = "parameter" if isinstance(tap, GradientTap) and tap.kind == "parameter" else "module"
        raise UsageError(f"Hook {owner.hook!r} has a tap without a target: {unknown(kind, tap.target, candidates)}")
    return candidates[tap.target]
