"""Modules with taps for graphs of torch.compile, and the operations of these graphs that call the taps."""

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..hooks import AttentionCall
from ..state import Transient
from .attention_tap import RUNNING
from .checked_function import is_symbolic
from .compiled_checks import CHECKS

SiteFunction = Callable[..., Tensor | None]
"""Takes what a tap reads: a tensor, the arguments and the output of a module, or an attention call."""
_NUMBERS = count()
SITES: WeakValueDictionary[int, "Site"] = WeakValueDictionary()
EXCLUDED, ELSEWHERE = "excluded", "elsewhere "
"""The kinds of a module whose uses of its weight are excluded, and of the model whose other uses are tapped.

The second one is followed by the name of the module and, in graphs, by the number of the model's site: the hooks of a
compiled model run outside of its graph, which has no other model.
"""
FORWARD_KINDS = frozenset({"input", "forward", "attention"})
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
        self.module_class = type(module)
        self.taps: list[SiteTap] = []
        self.kinds: tuple[str, ...] = ()
        self.is_in_graph = False
        self.handles: list[RemovableHandle] = []
        """Of the hooks that put operations into graphs."""
        SITES[int(self.number)] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the taps out of a copy of the model."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def is_readable(tensor: Tensor) -> bool:
    """Return whether an operation can take a tensor; there are none for DTensors and tensors of torch.func."""
    return not is_symbolic(tensor) and not type(tensor).__module__.startswith("torch.distributed")


def form_of(value: Any, tensors: list[Tensor], sizes: list[int]) -> Any:
    """Return a literal for a value, in which tensors and sizes are positions in lists, to which they are added."""
    if isinstance(value, Tensor):
        if not is_readable(value):
            return None
        tensors.append(value)
        return len(tensors) - 1
    if isinstance(value, torch.SymInt):
        sizes.append(value)  # type: ignore[arg-type]
        return ("size", [len(sizes) - 1])
    if isinstance(value, AttentionCall):
        names = [field.name for field in fields(value)]
        kind, items = type(value), [getattr(value, name) for name in names]
        return (f"{kind.__module__}:{kind.__qualname__}", names, [form_of(item, tensors, sizes) for item in items])
    if isinstance(value, tuple) and value and isinstance(value[0], str):
        *tag, items = value
        return (*tag, [form_of(item, tensors, sizes) for item in items])
    if isinstance(value, tuple):
        return ("tuple", [form_of(item, tensors, sizes) for item in value])
    return None if value is None else ("constant", [value])


def _value(form: Any, tensors: list[Tensor], sizes: list[int]) -> Any:
    """Return the value whose form :func:`form_of` has returned."""
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


def _due(number: Tensor | None, kind: str) -> list[SiteFunction]:
    site: Site | None = None
    if number is not None:
        site = SITES.get(int(number))
    elif kind.startswith(ELSEWHERE):
        kind, _, constant = kind.rpartition(" ")
        site = SITES.get(int(constant))
    elif RUNNING.modules:
        site = vars(RUNNING.modules[-1]).get("_site_in_graphs")
    if site is None or CHECKS.are_running:
        return []
    site.is_in_graph = True
    for tap in site.taps:
        tap.is_in_graph = True
    if site.label in CHECKS.left_out:
        return []
    return [tap.function for tap in site.taps if tap.kind == kind and tap.is_active()]


def _read(tensors: list[Tensor], number: Tensor | None, kind: str, form: str, sizes: list[int]) -> None:
    """Pass the tensors of a compiled pass to the due taps of a site; the values of a forward pass only once."""
    is_recomputed = kind in FORWARD_KINDS and torch._C._current_graph_task_id() != -1
    if not is_recomputed and (functions := _due(number, kind)):
        with torch.no_grad():
            # Attention calls contain parameters of the model, which hooks recognise.
            tensors = [item if isinstance(item, nn.Parameter) else item.detach() for item in tensors]
            value = _value(_parsed(form), tensors, sizes) if form else tensors[0]
            for function in functions:
                function(value)


def _replace(gradient: Tensor, number: Tensor | None, kind: str) -> Tensor:
    """Return the gradient that the due taps of a site make of one."""
    replaced = gradient
    for function in _due(number, kind):
        replacement = function(replaced)
        replaced = replaced if replacement is None else replacement
    return replaced.clone() if replaced is gradient else replaced  # an operation may not return its input


@cache
def define_operations(tracers: tuple[Callable[..., None], ...]) -> Any:
    """Define the operations, which the compiler neither removes nor reorders, and return their library."""
    from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

    # They take tensors of any layout, and graphs of CUDA would not call them again.
    tags = (torch.Tag.flexible_layout, torch.Tag.cudagraph_unsafe)
    library: Any = torch.library.Library("loopscope", "DEF")  # type: ignore[no-untyped-call]
    library.define("read(Tensor[] tensors, Tensor? number, str kind, str form, SymInt[] sizes) -> ()", tags=tags)
    library.define("replace(Tensor gradient, Tensor? number, str kind) -> Tensor", tags=tags)
    for name, function, shapes in (("read", _read, _no_shapes), ("replace", _replace, _same_shape)):
        library.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"loopscope::{name}", shapes, lib=library)
        _register_effectful_op(getattr(torch.ops.loopscope, name).default, _EffectType.ORDERED)
    for tracer in tracers:
        torch._dynamo.allow_in_graph(tracer)  # type: ignore[no-untyped-call]
    return library


def _no_shapes(*arguments: Any) -> None:
    """Return the shapes of an operation without a result."""


def _same_shape(gradient: Tensor, *arguments: Any) -> Tensor:
    return torch.empty_like(gradient)
