"""The training data that a loop gives to its hooks: a DataLoader, a stream, a list of batches, or a function."""

import inspect
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import BuiltinMethodType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..data import (
    Batch,
    Generator,
    Loader,
    TorchLoader,
    all_holders,
    attributes,
    derived_seed,
    seed_all,
    undisturbed,
    with_copied_samplers,
    without_generators,
)
from ..errors import UsageError, require
from ..hooks import ENDLESS
from ..state import RandomStreams
from ..state.values import ATOMS

ACCEPTED = (
    "it must be a DataLoader of torch, a list of batches, a function without arguments that returns a batch, or a "
    "loader of loopscope"
)
CONSUMED = (
    "whose batches can be read only once, so hooks would take them from the training; give the DataLoader, a list of "
    "batches or a function that draws a batch, or leave loader= out"
)
UNRELATED = (type, ModuleType, nn.Module, Tensor)
"""Objects that a function uses, but that keep no position in data."""
METHODS = (MethodType, BuiltinMethodType, MethodWrapperType)
WITHOUT_POSITION = (type, ModuleType, Tensor, FunctionType)
LONG = 100
"""A longer collection holds data or caches rather than the transforms of a data set."""
Variable = tuple[dict[str, Any] | CellType, str]
"""The mapping of an attribute or global variable with its name, or the cell of an enclosing variable."""
GivenData = Loader | DataLoader[Any] | list[Any] | Callable[[], Any]


def check_given(given: Any) -> None:
    """Raise :class:`UsageError` unless ``given`` is training data that hooks can read without changing the training."""
    if given is None or isinstance(given, Loader):
        return
    require(not isinstance(given, Iterator), f"loader is a {type(given).__name__}, {CONSUMED}.")
    if isinstance(given, list):
        require(bool(given), f"loader is an empty list; {ACCEPTED}.")
    elif isinstance(given, DataLoader):
        _refuse_iterators("The data set of loader=", CapturedState(given.dataset))
    else:
        is_function = callable(given) and not isinstance(given, (type, nn.Module))
        require(is_function, f"loader is a {type(given).__name__}; {ACCEPTED}.")
        if required := _required_arguments(given):
            raise UsageError(
                f"The function loader={_name(given)} needs the argument {required[0]!r}; give one without arguments, "
                f"such as loader=lambda: {_name(given)}(...)."
            )
        _refuse_iterators(f"The function loader={_name(given)}", CapturedState(given))


def as_loader(given: GivenData | None, seed: int) -> Loader | None:
    """Return the loader of training data that :func:`check_given` accepts."""
    if given is None or isinstance(given, Loader):
        return given
    if isinstance(given, list):
        return BatchList(given)
    if isinstance(given, DataLoader):
        return GivenDataLoader(given, seed)
    return BatchFunction(given, seed)


def length_of(loader: Any) -> int | None:
    """Return the number of batches, or ``None`` if it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # a generator, or a DataLoader of a stream
        return None


def _refuse_iterators(owner: str, captured: "CapturedState") -> None:
    kinds = [type(value).__name__ for value in captured.values() if isinstance(value, Iterator)]
    require(not kinds, f"{owner} reads from a {kinds[0] if kinds else ''}, {CONSUMED}.")


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a function in C
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [item.name for item in parameters if item.default is item.empty and item.kind not in optional]


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


class CapturedState:
    """The variables through which a function or a data set keeps a position: iterators, generators and plain values.

    These are the global and enclosing variables that a function reads, also through other functions of its module, and
    the attributes of the objects among them and of the objects in them, such as a data set's transforms.
    """

    def __init__(self, *roots: Any) -> None:
        self._variables: dict[tuple[int, str], Variable] = {}
        self._inner: dict[tuple[int, str], Variable] = {}
        """The attributes of objects in attributes, among which an iterator need not be one of batches."""
        self._visited: dict[int, Any] = {}
        for root in roots:
            self._visit(root, None)

    def _visit(self, value: Any, module: dict[str, Any] | None) -> None:
        """Collect the variables of a function (of ``module``, unless it is the first one) or an object."""
        if id(value) in self._visited:
            return
        self._visited[id(value)] = value
        if isinstance(value, FunctionType):
            if module is None or value.__globals__ is module:
                self._visit_function(value)
        elif parts := _parts_of(value):
            for item in parts:
                self._visit(item, module)
        elif not isinstance(value, UNRELATED):
            self._visit_object(value, module)

    def _visit_object(self, value: Any, module: dict[str, Any] | None) -> None:
        for holder in all_holders(value, kinds=(Dataset, DataLoader, Sampler)):
            for name in attributes(holder):
                self._add(attributes(holder), name)
        for part in _parts_within(value):
            self._inner |= {(id(attributes(part)), name): (attributes(part), name) for name in attributes(part)}
        call = getattr(type(value), "__call__", None)  # noqa: B004
        if isinstance(call, FunctionType):  # an object that is called like a function
            self._visit(call, module)

    def _visit_function(self, function: FunctionType) -> None:
        captured, space = inspect.getclosurevars(function), function.__globals__
        for name in captured.globals:
            self._add(space, name)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._add(cell, name)
        for item in (*captured.globals.values(), *captured.nonlocals.values(), *(function.__defaults__ or ())):
            self._visit(item, space)

    def _add(self, space: dict[str, Any] | CellType, name: str) -> None:
        self._variables[id(space), name] = (space, name)

    def values(self) -> list[Any]:
        """Return the values of the variables, and the objects among them."""
        return [*self._visited.values(), *map(_value_of, self._variables.values())]

    def _all_variables(self) -> list[Variable]:
        return [*self._variables.values(), *self._inner.values()]

    def generators(self) -> list[Generator]:
        """Return the random generators among the values."""
        values = [*self._visited.values(), *map(_value_of, self._all_variables())]
        kinds = [item for item in values if isinstance(item, Generator)]
        return list({id(item): item for item in kinds if not isinstance(item, random.SystemRandom)}.values())

    def read(self) -> list[Any]:
        """Return the plain values of the variables, such as the position of a reader."""
        return [value if type(value) in ATOMS else None for value in map(_value_of, self._all_variables())]

    def write(self, values: list[Any]) -> None:
        """Restore the result of :meth:`read`."""
        for (space, name), value in zip(self._all_variables(), values, strict=True):
            if value is None or _value_of((space, name)) is value:
                continue
            if isinstance(space, CellType):
                space.cell_contents = value
            else:
                space[name] = value


def _parts_of(value: Any) -> tuple[Any, ...]:
    """Return the function of a partial or a method, with its arguments or its object; nothing for other values."""
    if isinstance(value, partial):
        return value.func, *value.args, *value.keywords.values()
    return (value.__self__, getattr(value, "__func__", None)) if isinstance(value, METHODS) else ()


def _parts_within(value: Any) -> list[Any]:
    """Return the objects in attributes of an object, recursively, and in short collections there."""
    parts: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        for item in attributes(waiting.pop()).values():
            members = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else (item,)
            for member in members if len(members) <= LONG else ():
                if attributes(member) and id(member) not in parts and not isinstance(member, WITHOUT_POSITION):
                    parts[id(member)] = member
                    waiting.append(member)
    return list(parts.values())


def _value_of(variable: Variable) -> Any:
    space, name = variable
    if not isinstance(space, CellType):
        return space.get(name)
    try:
        return space.cell_contents
    except ValueError:  # the variable has no value yet
        return None


class IsolatedReader:
    """Reads batches with separate generators and a separate position, so that the training's are left unchanged."""

    def __init__(self, seed: int, *roots: Any) -> None:
        self._captured, self._streams = CapturedState(*roots), RandomStreams(seed)
        self._position = self._captured.read()

    def read(self, function: Callable[[], Any], place: tuple[int, int] | None = None) -> Any:
        """Return the result of ``function``, whose random numbers are a function of ``place``: epoch and number."""
        captured = self._captured
        generators, position = captured.generators(), captured.read()
        with self._streams.preserved(), undisturbed(generators):
            if place is not None:
                self._streams.derive(f"loader/{place[0]}", "batch", place[1])
                seed_all(generators)
            captured.write(self._position)
            try:
                return function()
            finally:
                self._position = captured.read()
                captured.write(position)


class BatchList(Loader):
    """The batches of a list, in its order in every epoch."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of the list."""
        return iter(self._batches[start:])

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self._batches)

    def shuffled(self, seed: int) -> "Loader":
        """Return the same batches in one other order."""
        order = list(self._batches)
        random.Random(derived_seed(seed, "order")).shuffle(order)
        return BatchList(order)


class EndlessLoader(Loader):
    """Training data of unknown length."""

    def __len__(self) -> int:
        """Return ``ENDLESS``."""
        return ENDLESS


class BatchFunction(EndlessLoader):
    """The batches that a function such as ``get_batch()`` returns, drawn on separate random streams.

    A function that keeps a position in plain variables has a separate position here.
    """

    def __init__(self, function: Callable[[], Any], seed: int) -> None:
        self._function, self._seed = function, seed
        self._reader = IsolatedReader(seed, function)

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield batches without end; each is a function of the seed, the epoch and its number."""
        for number in count(start):
            yield self._reader.read(self._function, (epoch, number))

    def shuffled(self, seed: int) -> "BatchFunction":
        """Return other draws of the function."""
        return BatchFunction(self._function, seed)


class GivenDataLoader(TorchLoader):
    """A DataLoader with copied samplers, whose data set and collate function may keep a position and generators.

    That of a stream (``IterableDataset``) may have no length.
    """

    def __init__(self, dataloader: DataLoader[Any], seed: int) -> None:
        self._is_endless = length_of(dataloader) is None
        super().__init__(with_copied_samplers(dataloader), seed)
        self._given, self._seed = dataloader, seed
        collate = dataloader.collate_fn
        is_of_torch = str(getattr(collate, "__module__", "")).startswith("torch.")
        self._reader = IsolatedReader(seed, dataloader.dataset, *(() if is_of_torch else (collate,)))

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches, and restore the position of the training in between.

        A stream without a length starts at its beginning, since it cannot skip batches.
        """
        start = 0 if self._is_endless else start
        # With copies of the samplers as they are now.
        batches = self._reader.read(
            lambda: TorchLoader(with_copied_samplers(self._given), self._seed).batches(epoch, start)
        )
        end = object()
        while (batch := self._reader.read(partial(next, batches, end))) is not end:
            yield batch

    def drawn(self, seed: int) -> TorchLoader:
        """Return the rows that a pass visits now, in an order that depends only on ``seed``."""
        self._dataloader = without_generators(with_copied_samplers(self._given))
        return super().drawn(seed)

    @property
    def copies(self) -> bool:
        """Whether every batch has separate memory."""
        return TorchLoader(self._dataloader, self._seed).copies

    def __len__(self) -> int:
        """Return the number of batches, or ``ENDLESS``."""
        return ENDLESS if self._is_endless else super().__len__()
