"""Hooks on nodes of autograd's graph (``node.register_prehook`` and ``node.register_hook``).

torch stores them in dicts that only the node, a C++ object, refers to; no public function returns these dicts. They
outlive a call on a node that the run uses: most often the one that accumulates the gradient of a parameter.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function, function
from torch.autograd.graph import get_gradient_edge

Table = dict[int, Any]
# Every node calls this undocumented function for a new hook, and looks it up on the class each time (torch 2.9 to
# 2.15): with the node's dict, or None if the node has none yet.
_NAME = "_register_hook"
# That function creates the handle as hooks.RemovableHandle(dict), where "hooks" is this name of its module. The name is
# replaced only during visits, for 0.1 µs; replacing an attribute of the class Function instead would take 6 µs, since
# it has hundreds of subclasses, whose cached attributes Python then drops.
_MODULE = vars(function)
_HOOKS = "hooks"
MAX_NODES = 100_000
"""Maximum number of nodes that are searched from one tensor."""


class NodeHookRecord:
    """The hooks that were registered on nodes since the start of the visit, by weak references to their dicts.

    Most dicts die with the call: those of graphs that the hook built itself. Without a living dict, the nodes of the
    run have no new hooks, and need not be searched.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[Table], int]] = []
        self._depth = 0
        self._replaced: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module that this record replaces."""
        return getattr(self._replaced, name)

    def start(self) -> None:
        """Record from now on, until the matching :meth:`stop`."""
        self._depth += 1
        if self._depth == 1:
            self._entries.clear()
            self._replaced = _MODULE.get(_HOOKS)
            _MODULE[_HOOKS] = self

    def stop(self) -> None:
        """Stop recording."""
        self._depth -= 1
        if self._depth == 0:
            if self._replaced is None:
                del _MODULE[_HOOKS]
            else:
                _MODULE[_HOOKS] = self._replaced

    def RemovableHandle(self, table: Table, **options: Any) -> Any:  # noqa: N802 - the name of torch's class
        """Return the handle of a new hook, and record it."""
        handle = self._replaced.RemovableHandle(table, **options)
        self._entries.append((weakref.ref(table), handle.id))
        return handle

    def newer(self, number: int) -> dict[int, Table]:
        """Return, by their ids, the living dicts with recorded hooks whose handles were created from ``number`` on."""
        tables = [(reference(), key) for reference, key in self._entries if key >= number]
        return {id(table): table for table, key in tables if table is not None and key in table}


NODE_HOOKS = NodeHookRecord()
"""The record of this process: torch's function for new hooks exists once."""


@cache
def is_recorded() -> bool:
    """Return whether this torch calls the recorded function; otherwise all nodes are searched for new hooks."""
    record = NodeHookRecord()
    with torch.enable_grad():
        node = torch.zeros(1, requires_grad=True).clone().grad_fn
    record.start()
    try:
        handle = node.register_prehook(_ignore)  # type: ignore[union-attr]
        return bool(record.newer(handle.id))
    finally:
        record.stop()


def newer_on_nodes(tensors: Mapping[str, Tensor], number: int) -> dict[str, list[Table]]:
    """Return, by the names of tensors, dicts of their nodes with hooks whose handles were created from ``number`` on.

    Nodes of other graphs, such as those that a hook builds and keeps, are not searched.
    """
    candidates = NODE_HOOKS.newer(number)
    if not candidates and is_recorded():
        return {}
    found: dict[str, list[Table]] = {}
    for name, tensor in tensors.items():
        with suppress(Exception):  # subclasses of tensors may reject any operation
            tables = [table for node in nodes_of(tensor) for table in tables_of(node)]
            if newer := [table for table in tables if any(key >= number for key in table)]:
                found[name] = newer
    return found


class _Found(BaseException):
    """Ends the registration of a hook, with the dict that it would have been added to."""


def _raise_found(table: Table | None, _: Any) -> None:
    raise _Found(table)


def _ignore(*_: object) -> None:
    """Do nothing: a hook."""


def tables_of(node: Any) -> list[Table]:
    """Return the dicts of hooks that a node has, without a change of the node."""
    replaced = vars(Function).get(_NAME)
    setattr(Function, _NAME, staticmethod(_raise_found))
    try:
        tables = [_table(node.register_prehook), _table(node.register_hook)]
    finally:
        if replaced is None:  # otherwise another library has replaced the inherited function
            delattr(Function, _NAME)
        else:
            setattr(Function, _NAME, replaced)
    return [table for table in tables if table]


def _table(register: Callable[[Any], Any]) -> Table | None:
    try:
        handle = register(_ignore)
    except _Found as found:
        table: Table | None = found.args[0]
        return table
    # The documented way, for a torch that registers hooks differently: it leaves an empty dict on the node.
    table = handle.hooks_dict_ref()
    handle.remove()
    return table


def nodes_of(tensor: Tensor) -> Iterator[Any]:
    """Yield the living nodes that a backward pass from or to a tensor uses."""
    if not tensor.requires_grad:
        return
    if tensor.grad_fn is None:
        # 1 if no node exists that accumulates the gradient: asking for one would create it.
        if tensor._use_count() > 1:  # type: ignore[attr-defined]
            yield get_gradient_edge(tensor).node
        return
    nodes: list[Any] = [tensor.grad_fn]
    seen = {*nodes}
    for node in nodes:  # the list grows
        yield node
        sources = [source for source, _ in node.next_functions if source is not None and source not in seen]
        seen.update(sources)
        nodes += sources if len(nodes) < MAX_NODES else ()
