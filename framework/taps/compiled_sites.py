"""Taps within graphs of torch.compile: an operation of the graph passes the tensors of the training's pass to them."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..hooks import AttentionCall
from ..state import InternalFunction, Transient, skips_frames
from .attention_reader import AttentionReader
from .callbacks import first_tensor
from .checked_function import is_symbolic
from .compiled_checks import CHECKS
from .training_use import is_training_use
from .weight_uses import tap_uses, weight_uses

SiteFunction = Callable[..., Tensor | None]
"""Takes what a tap reads: a tensor, the arguments and the output of a module, or an attention call."""
_NUMBERS = count()
_SITES: WeakValueDictionary[int, "Site"] = WeakValueDictionary()
EXCLUDED, ELSEWHERE = "excluded", "elsewhere "
"""The kinds of a module whose uses of its weight are excluded, and of the model whose other uses are tapped.

The second one is followed by the name of the module.
"""
REPLACED = " replaced"
"""Added to the kind of taps of which one replaces the gradient."""


@dataclass(eq=False)
class SiteTap:
    """One tap on the module of a site."""

    kind: str
    is_active: Callable[[], bool]
    function: SiteFunction
    replaces: bool = False
    is_in_graph: bool = False
    """Whether a graph has called it."""


class Site(Transient):
    """The taps on one module, for graphs of torch.compile.

    It is an attribute of the module, where graphs find its number as a tensor: blocks of one class share a graph, which
    would be compiled for each of them if the number was a constant of the graph. A site that is part of a graph stays
    on its module after the run, since graphs without it would be compiled again.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.number = torch.tensor(next(_NUMBERS))
        place = re.sub(r"\d+", "*", name.rpartition(".")[2])
        self.label = f"{place} ({type(module).__name__})" if place else "the model"
        """A description that all blocks of a class share, since it is a constant of the graph."""
        self.taps: list[SiteTap] = []
        self.kinds: tuple[str, ...] = ()
        self.is_in_graph = False
        self._handles: list[RemovableHandle] = []
        _SITES[int(self.number)] = self

    def add_hooks(self, module: nn.Module) -> None:
        """Add the hooks that put operations into graphs."""
        before, after = _Before(_do_nothing), _After(_do_nothing)
        self._handles = [
            module.register_forward_pre_hook(before),
            module.register_forward_hook(after, with_kwargs=True),
        ]
        module._forward_hooks_with_kwargs[self._handles[1].id] = after  # type: ignore[assignment]  # as attached_tap.py

    def remove_hooks(self, module: nn.Module) -> None:
        """Remove the hooks, and the site unless graphs refer to it."""
        for handle in self._handles:
            handle.remove()
        if not self.is_in_graph:
            vars(module).pop("_loopscope_site", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the taps out of a copy of the model."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


@contextmanager
def tapped_in_graphs(module: nn.Module, name: str, tap: SiteTap) -> Iterator[None]:
    """Let graphs of a module that are compiled in the body call a tap, if there is a compiler."""
    if "torch._dynamo" not in sys.modules:  # whose import takes seconds
        yield
        return
    _define_operations()
    site: Site = vars(module).get("_loopscope_site") or Site(module, name)
    module._loopscope_site = site  # type: ignore[assignment]
    site.taps.append(tap)
    replaced = {tap.kind for tap in site.taps if tap.replaces}
    kinds = dict.fromkeys(tap.kind for tap in site.taps)
    site.kinds = tuple(kind + REPLACED * (kind in replaced) for kind in kinds)
    if len(site.taps) == 1:
        site.add_hooks(module)
    try:
        with CHECKS.enabled(_TRACERS, _end_uses):
            yield
    finally:
        site.taps.remove(tap)
        if not site.taps:
            site.remove_hooks(module)


def _do_nothing(*arguments: Any) -> None:
    """Ignore a call outside of graphs."""


class _Before(InternalFunction):
    """A hook before a module's forward, which acts only in graphs."""

    @skips_frames
    def __call__(self, module: Any, inputs: tuple[Any, ...]) -> None:  # type: ignore[override]
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            site = module._loopscope_site
            if site is not None:
                trace_before(site.label, site.kinds, site.number, _plain(inputs))


class _After(InternalFunction):
    """A hook after a module's forward, which acts only in graphs."""

    @skips_frames
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:  # type: ignore[override]
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            site = module._loopscope_site
            if site is not None:
                weight = module._parameters.get("weight")
                shared = [_weight_in(module, kind) for kind in site.kinds if kind.startswith(ELSEWHERE)]
                call = (_plain(args), _plain(kwargs), _plain(output))
                trace_after(site.label, site.kinds, site.number, weight, shared, call)


def _weight_in(model: nn.Module, kind: str) -> Any:
    return model.get_submodule(kind.removesuffix(REPLACED).removeprefix(ELSEWHERE))._parameters["weight"]


def _plain(value: Any) -> Any:
    """Return a value of tensors and containers as pairs of a tag and a list, which a graph can hold.

    The compiler traces it. Other objects become ``None``: a number may be a symbol in a graph for variable shapes.
    """
    if isinstance(value, Tensor) or value is None:
        return value
    if isinstance(value, tuple):
        return ("tuple", [_plain(item) for item in value])
    if isinstance(value, list):
        return ("list", [_plain(item) for item in value])
    if isinstance(value, dict):
        kind = type(value)
        keys = [key for key in value if isinstance(key, str)]
        return (f"{kind.__module__}:{kind.__qualname__}", keys, [_plain(value[key]) for key in keys])
    return None


# The next two functions are opaque to the compiler. AOTAutograd calls them while it records the graph of a pass, where
# the graph of autograd exists too: they find tensors and nodes as taps outside of graphs do.


class _Use(NamedTuple):
    """A use of a module in the graph that is being recorded."""

    start: int
    """The number of the first node of autograd's graph."""
    reader: AttentionReader | None


_USES: list[_Use] = []
"""The uses that have begun; the last one is the innermost."""
_EXCLUDED_USES: set[tuple[Any, int]] = set()


def _end_uses() -> None:
    """End uses whose end is in another graph, after a break in the module's forward."""
    while _USES:
        _end_use()


def _end_use() -> _Use | None:
    use = _USES.pop() if _USES else None
    if use is not None and use.reader is not None:
        use.reader.__exit__(None, None, None)
    return use


def trace_before(label: str, kinds: tuple[str, ...], number: Tensor, inputs: Any) -> None:
    """Record the operations of taps before a module's forward."""
    if _is_fake(number) or not is_training_use():
        return
    if "input" in kinds and (first := first_tensor(inputs)) is not None and _is_readable(first):
        torch.ops.loopscope.read([first], number, "input", "", [])
    reader: AttentionReader | None = None
    if "attention" in kinds:
        reader = AttentionReader(partial(_trace_value, number, "attention"), lambda: _innermost_reader() is reader)
        reader.__enter__()
    _USES.append(_Use(torch._C._autograd._get_sequence_nr(), reader))  # type: ignore[attr-defined]


def _innermost_reader() -> AttentionReader | None:
    return next((use.reader for use in reversed(_USES) if use.reader is not None), None)


def _trace_value(number: Tensor, kind: str, value: Any) -> None:
    tensors: list[Tensor] = []
    sizes: list[int] = []
    form = repr(_form(value, tensors, sizes))
    torch.ops.loopscope.read(tensors, number, kind, form, sizes)


def trace_after(
    label: str, kinds: tuple[str, ...], number: Tensor, weight: Any, shared: list[Tensor], call: tuple[Any, ...]
) -> None:
    """Record the operations of taps after a module's forward, and of gradients."""
    if _is_fake(number) or not is_training_use():
        return
    use, output = _end_use(), call[2]
    weights = iter(shared)
    if "forward" in kinds:
        _trace_value(number, "forward", ("tuple", [*call]))
    for kind in kinds:
        on_gradient = partial(_trace_gradient, number, kind)
        if kind.startswith("output") and (first := first_tensor(output)) is not None and first.requires_grad:
            first.register_hook(on_gradient)  # type: ignore[no-untyped-call]
        elif kind.startswith("weight") and weight is not None and use is not None:
            tap_uses(weight, output, use.start, on_gradient)
        elif kind == EXCLUDED and use is not None:
            _EXCLUDED_USES.update(weight_uses(weight, output, use.start))
        elif kind.startswith(ELSEWHERE) and use is not None:
            tap_uses(next(weights), output, use.start, on_gradient, _EXCLUDED_USES)
    if shared:
        _EXCLUDED_USES.clear()


def _trace_gradient(number: Tensor, kind: str, gradient: Tensor) -> Tensor | None:
    if not _is_readable(gradient):
        return None
    if kind.endswith(REPLACED):
        return torch.ops.loopscope.replace(gradient, number, kind.removesuffix(REPLACED))  # type: ignore[no-any-return]
    torch.ops.loopscope.read([gradient], number, kind, "", [])
    return None


def _is_readable(tensor: Tensor) -> bool:
    """Return whether an operation can take a tensor; there are none for DTensors and tensors of torch.func."""
    return not is_symbolic(tensor) and not type(tensor).__module__.startswith("torch.distributed")


_TRACERS = (trace_before, trace_after)


def _is_fake(number: Tensor) -> bool:
    """Return whether the compiler only derives the shapes of a graph's values, before it is recorded."""
    return type(number).__module__ == "torch._subclasses.fake_tensor"


def _form(value: Any, tensors: list[Tensor], sizes: list[int]) -> Any:
    """Return a literal for a value, in which tensors and sizes are positions in lists, to which they are added."""
    if isinstance(value, Tensor):
        if not _is_readable(value):
            return None
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, torch.SymInt):
        sizes.append(value)  # type: ignore[arg-type]
        return ("size", [len(sizes) - 1])
    if isinstance(value, AttentionCall):
        names = [field.name for field in fields(value)]
        kind, items = type(value), [getattr(value, name) for name in names]
        return (f"{kind.__module__}:{kind.__qualname__}", names, [_form(item, tensors, sizes) for item in items])
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        *tag, items = value
        return (*tag, [_form(item, tensors, sizes) for item in items])
    if isinstance(value, tuple):
        return ("tuple", [_form(item, tensors, sizes) for item in value])
    return None if value is None else ("constant", [value])


def _value(form: Any, tensors: list[Tensor], sizes: list[int]) -> Any:
    """Return the value whose form :func:`_form` has returned."""
    if form is None:
        return None
    if isinstance(form, int):
        return tensors[form]
    tag, *names, items = form
    if tag in ("constant", "size"):
        return items[0] if tag == "constant" else sizes[items[0]]
    values = [_value(item, tensors, sizes) for item in items]
    if tag in ("tuple", "list"):
        return tuple(values) if tag == "tuple" else values
    module, _, name = tag.partition(":")
    return getattr(import_module(module), name)(**dict(zip(names[0], values, strict=True)))


_parsed = cache(ast.literal_eval)


def _due(number: Tensor, kind: str) -> list[SiteFunction]:
    site = _SITES.get(int(number))
    if site is None or CHECKS.are_running:
        return []
    site.is_in_graph = True
    for tap in site.taps:
        tap.is_in_graph = True
    return [tap.function for tap in site.taps if tap.kind == kind and tap.is_active()]


def _read(tensors: list[Tensor], number: Tensor, kind: str, form: str, sizes: list[int]) -> None:
    """Pass the tensors of a compiled pass to the due taps of a site."""
    if functions := _due(number, kind):
        with torch.no_grad():
            # Attention calls contain parameters of the model, which hooks recognise.
            tensors = [item if isinstance(item, nn.Parameter) else item.detach() for item in tensors]
            value = _value(_parsed(form), tensors, sizes) if form else tensors[0]
            for function in functions:
                function(value)


def _replace(gradient: Tensor, number: Tensor, kind: str) -> Tensor:
    """Return the gradient that the due taps of a site make of one."""
    replaced = gradient
    for function in _due(number, kind):
        replacement = function(replaced)
        replaced = replaced if replacement is None else replacement
    return replaced.clone() if replaced is gradient else replaced  # an operation may not return its input


@cache
def _define_operations() -> Any:
    """Define the operations, which the compiler neither removes nor reorders, and return their library."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    # They take tensors of any layout, and graphs of CUDA would not call them again.
    tags = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
    library: Any = torch.library.Library("loopscope", "DEF")  # type: ignore[no-untyped-call]
    library.define("read(Tensor[] tensors, Tensor number, str kind, str form, SymInt[] sizes) -> ()", tags=tags)
    library.define("replace(Tensor gradient, Tensor number, str kind) -> Tensor", tags=tags)
    for name, function, shapes in (("read", _read, _do_nothing), ("replace", _replace, _same_shape)):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"loopscope::{name}", shapes, lib=library)
        _register_effectful_op(getattr(torch.ops.loopscope, name).default, _EffectType.ORDERED)
    for tracer in _TRACERS:
        torch._dynamo.allow_in_graph(tracer)  # type: ignore[no-untyped-call]
    return library


def _same_shape(gradient: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(gradient)
