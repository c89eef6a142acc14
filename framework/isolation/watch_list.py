"""Flat lists of everything that a sweep of the tripwire reads, and the comparison of two sweeps."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from operator import call, itemgetter
from typing import Any

from torch import Tensor, nn

from ..state import Part, TrainingState, Transient, Watched, nested, tensors_of
from ..state.values import ATOMS, batch_contents, contents_of, has_contents, keys_of, short_name, values_of
from ..tensors import addresses, is_sharded

_NOT_CONTAINERS = (*ATOMS, Tensor)
_MISSING = object()
_PLAIN = frozenset({Tensor, nn.Parameter})
_HOLDERS = (Tensor, tuple, partial)
MOST_KNOWN = 10_000
MOST_LAYOUTS = 64
_PLAIN_SEQUENCES = frozenset({list, tuple})


_Layout = tuple[tuple[type, ...], tuple[int, ...], list[int], Callable[[Any], tuple[Any, ...]] | None]
"""Types of the values of all watched dicts, sizes of the dicts, places of containers, and a reader of these."""


class WatchList:
    """The watched objects of all parts in flat lists, valid while the containers hold the same objects.

    Tables that hold only tensors (most ``_parameters`` tables and optimizer states) yield their tensors directly;
    tensors in other tables are selected by position.
    """

    def __init__(self, state: TrainingState, parts: Sequence[Part] = ()) -> None:
        """List the watched objects of all parts of the state, or only of ``parts``."""
        self.parameters = [*state.model.parameters()]
        watched = [(part.name, part.watch(state)) for part in parts or state.parts]
        self._owners = {id(item): name for name, part in watched for item in (*part.tables, *part.containers)}
        self._owners |= {id(space): name for name, part in watched for space, _ in part.named_attributes}
        tables = [table for _, part in watched for table in part.tables]
        containers = [container for _, part in watched for container in part.containers]
        self._list_containers(tables, containers)
        entries = [entry for _, part in watched for entry in part.named_attributes]
        self._spaces, self._getters = [space for space, _ in entries], [itemgetter(*keys) for _, keys in entries]
        self._attribute_keys = [(space, key) for space, keys in entries for key in keys]
        watched_parts = [part for _, part in watched]
        self.tensor_parts = [part for part in watched_parts if part.read_tensors is not None]
        self.tensor_readers = [part.read_tensors for part in watched_parts if part.read_tensors is not None]
        self.step_parts = [part for part in watched_parts if part.step_tensors is not None]
        self.step_views = [part.step_tensors.values() for part in watched_parts if part.step_tensors is not None]
        self.value_parts = [part for part in watched_parts if part.read_values is not None]
        self.value_readers = [part.read_values for part in watched_parts if part.read_values is not None]
        self.getter_parts = [part for part in watched_parts if part.getters]
        self.getters = [part.getters for part in self.getter_parts]
        spaces = [(space, part) for part in watched_parts for space in part.spaces]
        self._value_spaces, self._space_parts = [space for space, _ in spaces], [part for _, part in spaces]
        self._space_views = [*map(values_of, self._value_spaces)]
        self._layouts: dict[tuple[tuple[type, ...], tuple[int, ...]], _Layout] = {}
        self._keyed_parts = [part for part in watched_parts if part.key]
        self._key_getters = [getter for part in self._keyed_parts for getter in part.key]
        self._key_values = (*map(call, self._key_getters),)
        self._keys = _keys_by_container([*tables, *containers, *self._value_spaces])
        self.tensors = (*chain.from_iterable(self.pure_views),)
        self.other_values = (*chain.from_iterable(self.mixed_views),)
        self.tensor_addresses, self.other_addresses = addresses(self.tensors), addresses(self.other_values)
        self._containers = _containers(self.read_attributes())
        self._last_addresses = addresses(self.read_attributes())
        self.attribute_addresses, self._positions = b"", list[int]()
        self._without_tensor: dict[int, Any] = {}
        """Tuples and partial functions that hold no tensor, by id, such as the strides of convolutions."""
        leaves = [leaf for item in self.other_values for _, leaf in nested("", item) if isinstance(leaf, Tensor)]
        direct = {*map(id, self.tensors)}
        self.nested_tensors = [leaf for leaf in leaves if id(leaf) not in direct]
        self.sharded = any(map(is_sharded, self.parameters))

    def _list_containers(self, tables: list[dict[Any, Any]], containers: list[Any]) -> None:
        self._empty = [container for container in (*tables, *containers) if not values_of(container)]
        self.empty_views = [*map(values_of, self._empty)]
        # One C call adds their values to the flat list, without a type check of each.
        empty = {*map(id, self._empty)}
        self.attributes = [container for container in containers if id(container) not in empty]
        filled = [table for table in tables if id(table) not in empty]
        self.pure = [table for table in filled if all(isinstance(item, Tensor) for item in values_of(table))]
        pure = {*map(id, self.pure)}
        self.mixed = [table for table in filled if id(table) not in pure]
        # A view shows the current values, so it is created once and read at every sweep.
        groups = (self.pure, self.mixed, self.attributes)
        self.pure_views, self.mixed_views, self._attribute_views = [[*map(values_of, group)] for group in groups]

    def no_longer_empty(self) -> list[Any]:
        """Return the containers that were empty when this list was built, and are not now."""
        return [container for container, view in zip(self._empty, self.empty_views, strict=True) if view]

    def has_equal_keys(self) -> bool:
        """Return whether all parts still have the containers of this list, after refreshing parts whose key differs."""
        now, previous, end = (*map(call, self._key_getters),), self._key_values, 0
        if now == previous:
            return True
        self._key_values = now
        for part in self._keyed_parts:
            start, end = end, end + len(part.key)
            if now[start:end] != previous[start:end] and (part.refresh is None or not part.refresh()):
                return False
        return True

    def read_attributes(self) -> tuple[Any, ...]:
        """Return the numbers of attributes of objects, the compared attributes, and the contents of containers."""
        try:
            attributes = [*chain.from_iterable(map(call, self._getters, self._spaces))]
        except KeyError:
            # An attribute was removed, such as the forward function with which a tap had replaced a module's.
            attributes = [space.get(key, _MISSING) for space, key in self._attribute_keys]
        return (*map(len, self._spaces), *attributes, *chain.from_iterable(self._attribute_views))

    def read_spaces(self) -> tuple[Any, ...]:
        """Return the values of the watched dicts, their types, the sizes of the dicts, and the contents of containers.

        By their types ``tensor(1.0)`` and ``True`` differ from 1.0 in comparisons. Equal types are the same tuple as
        before, so that two results are compared quickly.
        """
        values = (*chain.from_iterable(self._space_views),)
        key = (*map(type, values),), (*map(len, self._space_views),)
        kinds, sizes, containers, get_sequences = self._layouts.get(key) or self._add_layout(*key)
        if get_sequences is not None:
            # Nearly always all containers are lists and tuples of numbers, such as the betas, and then a few C calls
            # give what contents_of() returns for each of them.
            items = (*map(tuple, get_sequences(values)),)
            inner_kinds = (*map(type, chain.from_iterable(items)),)
            if ATOMS.issuperset(inner_kinds):
                return values, kinds, sizes, items, inner_kinds
        return values, kinds, sizes, [*map(contents_of, map(values.__getitem__, containers))], None

    def _add_layout(self, kinds: tuple[type, ...], sizes: tuple[int, ...]) -> "_Layout":
        """Return the layout of the watched dicts with values of these types, and remember it: a step has a few."""
        containers = self._find_containers(kinds)
        are_plain = _PLAIN_SEQUENCES.issuperset([kinds[place] for place in containers])
        places = containers if are_plain and len(containers) > 1 else ()
        if len(self._layouts) >= MOST_LAYOUTS:
            self._layouts.clear()
        layout = kinds, sizes, containers, itemgetter(*places) if places else None
        self._layouts[kinds, sizes] = layout
        return layout

    def _find_containers(self, kinds: tuple[type, ...]) -> list[int]:
        """Return the positions, among the values of all dicts, of those whose contents are compared.

        The contents of the current step, and the parameters of a group, are compared as tensors.
        """
        return [
            place
            for place, ((part, key), kind) in enumerate(zip(self._value_owners(), kinds, strict=True))
            if has_contents(kind) and part.step_tensors is None and key != "params"
        ]

    def _value_owners(self) -> list[tuple[Watched, Any]]:
        """Return the part and the key of each value of the watched dicts."""
        pairs = zip(self._value_spaces, self._space_parts, strict=True)
        return [(part, key) for space, part in pairs for key in space]

    def name_of_difference_in_spaces(self, previous: tuple[Any, ...], now: tuple[Any, ...]) -> str:
        """Name the first value that differs between two results of :meth:`read_spaces`; empty if none does."""
        sizes = _first_difference(previous[2], now[2])
        if sizes < len(self._space_parts):
            return self._space_parts[sizes].label
        # The sizes are equal, so that the position of a value, type or content gives its dict.
        owners = self._value_owners()
        places = [*range(len(owners)), *range(len(owners)), *self._find_containers(now[1])]
        flat = [(*values, *kinds, *_contents_of_each(*contents)) for values, kinds, _, *contents in (previous, now)]
        index = _first_difference(*flat)
        if index == len(places):
            return ""
        part, key = owners[places[index]]
        return f"{part.label} ({short_name(key)})"

    def is_current(
        self, tensors: tuple[Any, ...], others: tuple[Any, ...], attributes: tuple[Any, ...] | None = None
    ) -> bool:
        """Return whether this list is valid for a sweep; attributes may hold other plain values and tensors now."""
        if any(self.empty_views):
            return False
        if addresses(tensors) != self.tensor_addresses or addresses(others) != self.other_addresses:
            return False
        if attributes is None:
            return True
        # Plain values are new objects on most steps, so different addresses do not yet require a new list.
        now = self.attribute_addresses  # the addresses of ``attributes``: tensors_of() was just called with them
        if now != self._last_addresses and addresses(_containers(attributes)) != addresses(self._containers):
            return False
        self._last_addresses = now
        return True

    def tensors_of(self, attributes: tuple[Any, ...]) -> list[Tensor]:
        """Return the tensors in the result of :meth:`read_attributes`."""
        now = addresses(attributes)
        if now != self.attribute_addresses:
            self.attribute_addresses = now
            self._positions = [
                place
                for place, value in enumerate(attributes)
                if type(value) not in ATOMS and isinstance(value, _HOLDERS) and self._holds_tensor(value)
            ]
        if not self._positions:
            return []
        # read again, since another object may have reused an address
        return [tensor for place in self._positions for tensor in _fixed_tensors(attributes[place])]

    def _holds_tensor(self, value: Any) -> bool:
        if self._without_tensor.get(id(value)) is value:
            return False
        if any(True for _ in _fixed_tensors(value)):
            return True
        if len(self._without_tensor) >= MOST_KNOWN:
            self._without_tensor.clear()
        self._without_tensor[id(value)] = value
        return False

    def restore_attributes(self, previous: tuple[Any, ...]) -> None:
        """Restore the named attributes of objects, such as modes, from the result of :meth:`read_attributes`."""
        start = len(self._spaces)
        values = previous[start : start + len(self._attribute_keys)]
        for (space, key), value in zip(self._attribute_keys, values, strict=True):
            if value is _MISSING:  # as of an optimizer whose param_groups are a property
                space.pop(key, None)
            else:
                space[key] = value

    def name(self, container: Any, names: dict[int, str]) -> str:
        """Return the name of a container: of the object that it belongs to, otherwise of its part."""
        return names.get(id(container), self._owners[id(container)])

    def attribute(self, previous: tuple[Any, ...], now: tuple[Any, ...], names: dict[int, str]) -> str:
        """Name the first attribute or item that differs between two results of :meth:`read_attributes`."""
        start = len(self._spaces)
        index = _first_difference(previous, now)
        if index < start:
            return f"the attributes of {self.name(self._spaces[index], names)}"
        if index < start + len(self._attribute_keys):
            space, key = self._attribute_keys[index - start]
            return f"{self.name(space, names)}.{short_name(key)}"
        start += len(self._attribute_keys)
        return self.name_of_difference(self.attributes, previous[start:], names)

    def name_of_difference(self, containers: list[Any], previous: tuple[Any, ...], names: dict[int, str]) -> str:
        """Name the first item at which containers differ from their former values, given as one flat tuple."""
        sizes = [len(self._keys[id(container)]) for container in containers]
        if sum(sizes) != len(previous):  # containers of plain values may have grown since this list was built
            sizes = [len(values_of(container)) for container in containers]
        position = 0
        for container, size in zip(containers, sizes, strict=True):
            former, position = previous[position : position + size], position + size
            keys, now = self._keys[id(container)], (*values_of(container),)
            if same_values(former, now):
                continue
            if not isinstance(container, dict):
                return self.name(container, names)
            present = dict(zip(keys_of(container), now, strict=True))
            key = _changed_key(dict(zip(keys if len(keys) == size else present, former, strict=False)), present)
            # keys of an optimizer's state are parameters, whose text would be their values
            known = names.get(id(key), "") if isinstance(key, Tensor) else ""
            label = known if known.startswith("parameters/") else short_name(key)
            return f"{self.name(container, names)}.{label}"
        return "a container"


def _fixed_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a tensor, or the tensors in a tuple or a partial function: these cannot be replaced by others."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _fixed_tensors(item)
    elif isinstance(value, partial):
        for item in (*value.args, *value.keywords.values()):
            yield from _fixed_tensors(item)


def step_tensors(values: Iterable[Any]) -> tuple[Tensor, ...]:
    """Return the tensors of a step, such as batch, losses and gradients, in the values of a dict.

    Nearly every value is a tensor, or a tuple or dict of plain tensors; only other batches are walked completely.
    """
    tensors: list[Tensor] = []
    for value in values:
        kind = type(value)
        if kind in ATOMS:  # most values are numbers or None
            continue
        if kind is Tensor:
            tensors.append(value)
        elif kind is tuple or kind is dict or kind is list:
            items = value.values() if kind is dict else value
            if _PLAIN.issuperset(map(type, items)):
                tensors += items
            elif not ATOMS.issuperset(map(type, items)):
                tensors += tensors_of(value)
        elif kind in _PLAIN:
            tensors.append(value)
        elif not isinstance(value, Transient):
            tensors += tensors_of(value)
    return tuple(tensors)


def contents_of_batch(batch: Any) -> tuple[Any, ...]:
    """Return the contents of a batch apart from its tensors, which :func:`step_tensors` returns, and array elements.

    Nearly every batch is a tuple, list or dict of plain tensors; only other batches are walked completely.
    """
    kind = type(batch)
    if kind is tuple or kind is list:
        return () if _PLAIN.issuperset(map(type, batch)) else batch_contents(batch)
    if kind is dict and _PLAIN.issuperset(map(type, batch.values())):
        return (*batch,)
    return batch_contents(batch)


def _contents_of_each(contents: Sequence[Any], kinds: Sequence[type] | None) -> Sequence[Any]:
    """Return the contents of every container as contents_of() does; ``kinds`` are the types of all items, if flat."""
    if kinds is None:
        return contents
    rest = iter(kinds)
    return [(items, (*islice(rest, len(items)),)) for items in contents]


def _keys_by_container(containers: list[Any]) -> dict[int, tuple[Any, ...]]:
    """Return the keys of dicts and the indices of other containers, to name items that are missing later."""
    return {
        id(container): (*(keys_of(container) if isinstance(container, dict) else range(len(values_of(container)))),)
        for container in containers
    }


def _changed_key(previous: dict[Any, Any], now: dict[Any, Any]) -> Any:
    """Return the first key that only one of two dicts has, or whose values differ."""
    return next(
        (key for key in {**previous, **now} if not same_value(previous.get(key, _MISSING), now.get(key, _MISSING))), ""
    )


def _first_difference(previous: Sequence[Any], now: Sequence[Any]) -> int:
    pairs = enumerate(zip(previous, now, strict=False))
    return next((i for i, (old, new) in pairs if not same_value(old, new)), min(len(previous), len(now)))


def _containers(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple([value for value in values if type(value) not in _NOT_CONTAINERS])


def same_values(previous: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    """Compare two tuples item by item, first by identity."""
    if len(previous) != len(now):
        return False
    # One comparison of memory first; item by item only if objects differ, as recomputed numbers do.
    return addresses(previous) == addresses(now) or all(map(same_value, previous, now))


def same_value(previous: Any, now: Any) -> bool:
    """Return whether two objects are the same or equal plain values of the same type.

    A tensor is never equal to another object: comparing it by value would take ``tensor(1.0)`` for the number 1.0.
    """
    if previous is now:
        return True
    if type(previous) is not type(now) or isinstance(previous, Tensor):
        return False
    try:
        if bool(previous != now):
            return False
    except Exception:  # arrays, and objects with custom comparisons
        return False
    return not isinstance(previous, (tuple, list)) or _same_items(previous, now)


def _same_items(previous: Sequence[Any], now: Sequence[Any]) -> bool:
    """Return whether equal sequences have items of the same types, and no tensor in them is another object."""
    kinds = [*map(type, previous)]
    if kinds != [*map(type, now)]:
        return False
    return not any([issubclass(kind, Tensor) for kind in {*kinds}]) or addresses((*previous,)) == addresses((*now,))
