"""Taps within graphs of torch.compile: an operation of the graph passes the tensors of the training's pass to them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..state import InternalFunction, skips_frames
from .attention_reader import AttentionReader
from .attention_tap import RUNNING
from .callbacks import first_tensor
from .compiled_checks import CHECKS
from .compiled_sites import ELSEWHERE, EXCLUDED, REPLACED, SITES, Site, SiteTap, define_operations, form_of, is_readable
from .passes import is_training_use
from .weight_uses import tap_uses, weight_uses

Number = Tensor | int | None
"""The number of a site, as an input of the graph or a constant; without one, that of the running module is meant."""


@contextmanager
def tapped_in_graphs(module: nn.Module, name: str, tap: SiteTap) -> Iterator[None]:
    """Let graphs of a module that are compiled in the body call a tap, if there is a compiler."""
    if "torch._dynamo" not in sys.modules:  # whose import takes seconds
        yield
        return
    define_operations(_TRACERS)
    site: Site = vars(module).get("_site_in_graphs") or Site(module, name)
    module._site_in_graphs = site  # type: ignore[assignment]
    site.taps.append(tap)
    replaced = {tap.kind for tap in site.taps if tap.replaces}
    kinds = dict.fromkeys(tap.kind for tap in site.taps)
    site.kinds = tuple(kind + REPLACED * (kind in replaced) for kind in kinds)
    if len(site.taps) == 1:
        _add_hooks(site, module)
    try:
        with CHECKS.enabled(_TRACERS, add_root, _end_uses):
            yield
    finally:
        site.taps.remove(tap)
        if not site.taps:
            for handle in site.handles:
                handle.remove()
            if not site.is_in_graph:
                vars(module).pop("_site_in_graphs", None)


def _add_hooks(site: Site, module: nn.Module) -> None:
    """Add the hooks that put operations into graphs."""
    before, after = _Before(_do_nothing), _After(_do_nothing)
    site.handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True)]
    module._forward_hooks_with_kwargs[site.handles[1].id] = after  # type: ignore[assignment]  # as attached_tap.py


def _do_nothing(*arguments: Any) -> None:
    """Ignore a call outside of graphs."""


class _Before(InternalFunction):
    """A hook before a module's forward, which acts only in graphs."""

    @skips_frames
    def __call__(self, module: Any, inputs: tuple[Any, ...]) -> None:  # type: ignore[override]
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            site = module._site_in_graphs
            if site is not None:
                trace_before(site.label, site.kinds, site.number, _plain(inputs))


class _After(InternalFunction):
    """A hook after a module's forward, which acts only in graphs."""

    @skips_frames
    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:  # type: ignore[override]
        if torch.compiler.is_dynamo_compiling() and not torch.compiler.is_exporting():
            site = module._site_in_graphs
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


def trace_before(label: str, kinds: tuple[str, ...], number: Number, inputs: Any) -> None:
    """Record the operations of taps before a module's forward."""
    if _is_fake(number) or not is_training_use():
        return
    if "input" in kinds and (first := first_tensor(inputs)) is not None and is_readable(first):
        torch.ops.loopscope.read([first], number, "input", "", [])
    reader: AttentionReader | None = None

    def is_innermost() -> bool:
        return reader is next((use.reader for use in reversed(_USES) if use.reader is not None), None)

    if "attention" in kinds:
        reader = AttentionReader(partial(_trace_value, number, "attention"), is_innermost)
        reader.__enter__()
    _USES.append(_Use(torch._C._autograd._get_sequence_nr(), reader))  # type: ignore[attr-defined]


def _trace_value(number: Number, kind: str, value: Any) -> None:
    tensors: list[Tensor] = []
    sizes: list[int] = []
    form = repr(form_of(value, tensors, sizes))
    torch.ops.loopscope.read(tensors, number if isinstance(number, Tensor) else None, kind, form, sizes)


def trace_after(
    label: str, kinds: tuple[str, ...], number: Number, weight: Any, shared: list[Tensor], call: tuple[Any, ...]
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


def _trace_gradient(number: Number, kind: str, gradient: Tensor) -> Tensor | None:
    if not is_readable(gradient):
        return None
    is_replaced, kind = kind.endswith(REPLACED), kind.removesuffix(REPLACED)
    if isinstance(number, int):
        number, kind = None, f"{kind} {number}"
    if is_replaced:
        return torch.ops.loopscope.replace(gradient, number, kind)  # type: ignore[no-any-return]
    torch.ops.loopscope.read([gradient], number, kind, "", [])
    return None


def add_root(graph: Any, root: Any) -> None:
    """Add the taps of the module ``root`` whose forward became a graph, outside of which its hooks run.

    They are those on attention and on uses of a weight; all others see the inputs and outputs of the graph. Blocks of a
    class share a graph, so that a tap on the attention of any of them counts.
    """
    sites = [site for site in SITES.values() if "attention" in site.kinds]
    running = [vars(module).get("_site_in_graphs") for module in RUNNING.modules[-1:]]
    site = next((site for site in sites if site in running or site.module_class is type(root)), None)
    own: Site | None = vars(root).get("_site_in_graphs") if isinstance(root, nn.Module) else None
    kinds = () if site is None else ("attention",)
    weights: list[Any] = []
    nodes = [*graph.graph.nodes]
    if own is not None:
        inputs = {id(node.meta["grapharg"].example): node for node in nodes if "grapharg" in node.meta}
        shared = {kind: inputs.get(id(_weight_in(root, kind))) for kind in own.kinds if kind.startswith(ELSEWHERE)}
        used = {kind: weight for kind, weight in shared.items() if weight is not None}
        kinds, weights = (*kinds, *used), [*used.values()]
    number = None if own is None else int(own.number)
    label = getattr(own or site, "label", "")
    if not kinds or any(node.target in _TRACERS and node.args[0] == label for node in nodes):
        return
    with graph.graph.inserting_before(next(node for node in nodes if node.op != "placeholder")):
        graph.graph.call_function(trace_before, (label, kinds, number, None))
    with graph.graph.inserting_before(nodes[-1]):
        call = (None, None, [*nodes[-1].args[0]])
        graph.graph.call_function(trace_after, (label, kinds, number, None, weights, call))


_TRACERS = (trace_before, trace_after)


def _is_fake(number: Number) -> bool:
    """Return whether the compiler only derives the shapes of a graph's values, before it is recorded."""
    return type(number).__module__ == "torch._subclasses.fake_tensor"
