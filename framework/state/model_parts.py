"""The parts of a training state that belong to the model: tensors, gradients, modules and hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain
from operator import attrgetter, call
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..tensors import addresses
from .attributes import (
    MODULE_ATTRIBUTES,
    TABLES,
    UNSAVED_BUFFERS,
    FromPlainForms,
    PlainForms,
    is_hook_table,
    module_attributes,
    space_of,
    tensor_attributes,
)
from .compiled_code import compiler_of_calls, skips_frame, skips_frames
from .generators import StreamState
from .module_group import ModuleOrGroup
from .node_hooks import NODE_HOOKS, is_recorded, newer_on_nodes
from .parameter_groups import trained_by
from .parts import Leaves, Part, StateObjects, Watched, nested
from .sharding import ShardingState
from .values import Transient

_grad = attrgetter("grad")
# The tables of register_hook and register_post_accumulate_grad_hook; torch has no public function that lists hooks.
_hooks_on_gradient = attrgetter("_backward_hooks")
_hooks_after_gradient = attrgetter("_post_accumulate_grad_hooks")
GRADIENT_HOOKS = (_hooks_on_gradient, _hooks_after_gradient)


class InternalHook(Transient):
    """Base of the hooks that loopscope registers on parameters and modules; they change nothing undeclared.

    Hooks that users register there belong to the training state, since the run may depend on them. Internal hooks do
    not: a run with them and a run without them have the same digests.
    """


class InternalFunction(InternalHook):
    """A function that loopscope registers as a hook of a parameter or module.

    A copy of the model, such as an average of weights, is not that of the run: its copy of the hook does nothing, and
    pickles to a function that does nothing and needs no loopscope.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @skips_frames
    def __call__(self, *arguments: Any) -> Any:
        """Call the function; while torch's compiler traces a call, do nothing, so that its graph is unchanged."""
        if torch.compiler.is_dynamo_compiling():
            return None
        return self._function(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "InternalFunction":
        return InternalFunction(_do_nothing)

    def __reduce__(self) -> tuple[Any, ...]:
        # This method takes any arguments and returns None, as a module hook that changes nothing does.
        return getattr, (nullcontext(), "__exit__")


class FunctionBeforeForward(InternalFunction):
    """A function of a module and its inputs that also receives whether torch's compiler makes graphs of the forward.

    It makes none of the methods of torch's own modules, outside of the graphs of others.
    """

    @skips_frame  # with the frames of all functions that it calls, there would be no compiler here
    def __call__(self, module: Any, inputs: Any) -> Any:  # type: ignore[override]
        """Call the function, which must skip its frames; while torch's compiler traces a call, do nothing."""
        if torch.compiler.is_dynamo_compiling():
            return None
        is_compiled = compiler_of_calls() is not None and not type(module).__module__.startswith("torch.nn.")
        return self._function(module, inputs, is_compiled)


def _do_nothing(*arguments: Any) -> None:
    """Ignore a call."""


class TensorPart(Part):
    """Base of the parts with one value for each of the model's parameters or buffers."""

    def named(self, modules: ModuleOrGroup) -> Iterable[tuple[str, Any]]:
        """Yield the parameters or buffers of the model with their names."""
        return modules.named_parameters()

    def value(self, tensor: Any) -> Any:
        """Return the value of one parameter or buffer."""
        return tensor

    def set_value(self, tensor: Any, value: Any) -> None:
        """Restore the value of one parameter or buffer."""
        tensor.copy_(value)

    def read(self, state: StateObjects) -> Leaves:
        """Yield the value of every tensor."""
        return ((f"{self.name}/{name}", self.value(tensor)) for name, tensor in self.named(state.modules))

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, Any]:
        """Return the values by name."""
        return {name: self.value(tensor) for name, tensor in self.named(state.modules)}

    @torch.no_grad()
    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Set every value in place."""
        for name, tensor in self.named(state.modules):
            self.set_value(tensor, stored[name])

    def misfit(self, state: StateObjects, stored: Mapping[str, Any]) -> str:
        """Compare names, shapes and dtypes."""
        present = dict(self.named(state.modules))
        misfits = [name for name, value in stored.items() if name in present and not _fits(value, present[name])]
        return _describe_misfits(self.name, sorted(present.keys() ^ stored.keys()) or sorted(misfits))


def _fits(value: Any, tensor: Tensor) -> bool:
    return not isinstance(value, Tensor) or (value.shape, value.dtype) == (tensor.shape, tensor.dtype)


def _describe_misfits(part: str, names: Sequence[str]) -> str:
    return f"was written for another model: its {part} differ ({', '.join(names[:5])})" if names else ""


class Parameters(TensorPart):
    """The parameters; with them the guardian walks the whole model."""

    name = "parameters"

    def persistent(self, state: StateObjects) -> Iterable[Any]:
        """Return the model and the other modules."""
        return (state.model, *state.also.values())


class Buffers(TensorPart):
    """The buffers, which the guardian reaches through the model."""

    name = "buffers"

    def named(self, modules: ModuleOrGroup) -> Iterable[tuple[str, Any]]:
        """Yield the buffers."""
        return modules.named_buffers()


class RequiresGrad(TensorPart):
    """``requires_grad`` of every parameter."""

    name = "requires_grad"

    def value(self, tensor: Any) -> bool:
        """Return whether the parameter requires a gradient."""
        return bool(tensor.requires_grad)

    def set_value(self, tensor: Any, value: bool) -> None:
        """Set the flag."""
        tensor.requires_grad_(value)

    def watch(self, state: StateObjects) -> Watched:
        """Compare the flags of all parameters."""
        named = dict(state.modules.named_parameters())

        def restore(previous: Iterable[bool]) -> None:
            for parameter, flag in zip(named.values(), previous, strict=True):
                if parameter.requires_grad is not flag:
                    parameter.requires_grad_(flag)

        read = partial(map, attrgetter("requires_grad"), [*named.values()])
        names = [f"parameters/{name} (its requires_grad)" for name in named]
        return Watched(read_values=read, names=names, restore=restore)


class Gradients(TensorPart):
    """The gradients: their values, and whether they are ``None``."""

    name = "gradients"
    has_temporary = True

    def value(self, tensor: Any) -> Tensor | None:
        """Return the gradient."""
        gradient: Tensor | None = tensor.grad
        return gradient

    def set_value(self, tensor: Any, value: Tensor | None) -> None:
        """Set the gradient, on the device of its parameter: checkpoints are read to the CPU."""
        tensor.grad = None if value is None else value.to(tensor.device)

    def keep(self, state: StateObjects, owners: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of all owners."""
        return (*map(_grad, owners),)

    def temporary(self, kept: tuple[Tensor | None, ...]) -> Iterable[Any]:
        """Return the gradients."""
        return kept

    def restore(self, state: StateObjects, owners: list[Tensor], kept: tuple[Tensor | None, ...]) -> None:
        """Set the same gradient tensors again."""
        # Compared first, since setting a gradient checks its device, dtype and layout every time.
        if addresses(kept) != addresses((*map(_grad, owners),)):
            for owner, gradient in zip(owners, kept, strict=True):
                owner.grad = gradient

    def watch(self, state: StateObjects) -> Watched:
        """Compare the gradients of all parameters."""
        # In a pass of functional_call the model has other tensors in their place, whose gradient torch warns of.
        parameters: list[Tensor] = [item for item in state.modules.parameters() if item.is_leaf]
        return Watched(
            read_tensors=partial(map, _grad, parameters),
            label="a gradient was replaced",
            restore=partial(self.restore, state, parameters),
        )


class HookCounts:
    """Counts the hooks in some tables; counts again only if torch has created a handle since the last count.

    Args:
        tables: returns the tables, ``None`` for a missing one.
        label: names the difference between two counts.
        readers: return the tables that exist now, whose contents are compared too.
        names: the names of these tables.
    """

    # next_id is undocumented: torch numbers handles consecutively, and a handle's number is the key of its hook.
    next_handle = staticmethod(partial(getattr, RemovableHandle, "next_id"))
    """Returns the number of the next handle."""

    def __init__(
        self,
        tables: Callable[[], Iterable[dict[int, Any] | None]],
        label: str,
        readers: Sequence[Callable[[], dict[int, Any] | None]],
        names: Sequence[str],
    ) -> None:
        self._tables, self._label, self._readers, self._names = tables, label, readers, names
        # Hooks may be removed without a new handle, after which a count would be outdated.
        self._read = {item[0] for item in self._contents() if item}
        self._handles, self._counts, self._ids = RemovableHandle.next_id, self._count(), self._table_ids()

    def _contents(self) -> tuple[Any, ...]:
        """Return the id, keys and hooks of every table that is read, in the order in which torch calls the hooks."""
        tables = map(call, self._readers)
        return tuple([(id(table), *table, *table.values()) if table else () for table in tables])

    def _count(self) -> tuple[int, ...]:
        """Return the number of hooks in each table that is not empty, without those whose contents are read."""
        return tuple([len(table) for table in self._tables() if table and id(table) not in self._read])

    def _table_ids(self) -> list[int]:
        return [id(table) for table in self._tables() if table is not None]

    def refresh(self) -> bool:
        """Count again at the start of a visit; return whether the same tables exist and have hooks."""
        ids, counts = self._ids, self._counts
        self._handles, self._counts, self._ids = RemovableHandle.next_id, self._count(), self._table_ids()
        return self._ids == ids and self._counts == counts

    def differences(self, previous: tuple[Any, ...]) -> list[str]:
        """Name the tables that differ: a new handle may also be of a hook elsewhere, or of one that is gone."""
        if self._readers and (now := self._contents()) != previous[1]:
            triples = zip(self._names, previous[1], now, strict=True)
            return [name for name, old, new in triples if old != new]
        return [] if self._count() == self._counts else [self._label]

    def remove_newer(self, _: Any = None) -> None:
        """Remove the hooks whose handles were created since the last count, as ``handle.remove()`` would."""
        for table in filter(None, self._tables()):
            for number in [number for number in table if number >= self._handles]:
                del table[number]

    def watched(self) -> Watched:
        """Return the values for the tripwire: the next handle, and the contents of the tables."""
        return Watched(
            getters=[self.next_handle, self._contents] if self._readers else [self.next_handle],
            key=[self.next_handle],
            refresh=self.refresh,
            differences=self.differences,
            restore=self.remove_newer,
        )


class GradientHooks(Part):
    """The hooks on parameters, which a checkpoint stores as part of all hooks."""

    name = "gradient hooks"

    def watch(self, state: StateObjects) -> Watched:
        """Count the hooks of both kinds on every parameter, and compare the tables of those that have any."""
        parameters = _trained(state)

        def tables() -> Iterator[dict[int, Any] | None]:
            yield from map(_hooks_on_gradient, parameters)
            yield from map(_hooks_after_gradient, parameters)

        # Most parameters have no tables. The table of one that has may be replaced, so it is read from the parameter.
        filled = [(read, item) for read in GRADIENT_HOOKS for item in parameters if read(item) is not None]
        readers = [partial(read, item) for read, item in filled]
        names_by_id = {id(item): name for name, item in state.modules.named_parameters()}
        names = [f"a hook on parameters/{names_by_id.get(id(item), 'of the optimizer')}" for _, item in filled]
        return HookCounts(tables, "a hook on a parameter", readers, names).watched()


def _trained(state: StateObjects) -> list[Tensor]:
    """Return the parameters of the model, and those that only the optimizer has."""
    parameters: list[Tensor] = [*state.modules.parameters()]
    ids = {*map(id, parameters)}
    of_optimizer = [item for item in trained_by(state.optimizer) if isinstance(item, Tensor)]
    return parameters + [item for item in of_optimizer if id(item) not in ids]


class NodeHooks(Part):
    """The hooks on the nodes of autograd's graphs that the run uses, such as those that accumulate gradients."""

    name = "node hooks"

    def keep(self, state: StateObjects, owners: list[Tensor]) -> int:
        """Return the number of the next handle, from which on hooks are new."""
        return RemovableHandle.next_id

    def restore(self, state: StateObjects, owners: list[Tensor], kept: int) -> None:
        """Remove the hooks whose handles were created since :meth:`keep`."""
        if NODE_HOOKS.newer(kept) or not is_recorded():
            for table in chain.from_iterable(newer_on_nodes(_tensors_with_nodes(state), kept).values()):
                for number in [number for number in table if number >= kept]:
                    del table[number]

    def watch(self, state: StateObjects) -> Watched:
        """Search for new hooks if handles were created."""

        def differences(previous: tuple[int, ...]) -> list[str]:
            if not NODE_HOOKS.newer(previous[0]) and is_recorded():
                return []
            tables = newer_on_nodes(_tensors_with_nodes(state), previous[0])
            return [
                f"a hook on a graph node of {name}" for name, found in tables.items() if _has_new(found, previous[0])
            ]

        def restore(previous: tuple[int, ...]) -> None:
            self.restore(state, [], previous[0])

        return Watched(getters=[HookCounts.next_handle], differences=differences, restore=restore)


def _has_new(tables: Iterable[dict[int, Any]], number: int) -> bool:
    """Return whether a hook was added; removes hooks of ``torch.utils.swap_tensors``, which refuse backward passes.

    Tensors that are still exchanged are reported as such; after an exchange and its reversal nothing has changed.
    """
    is_new = False
    for table in tables:
        for key in [key for key in table if key >= number]:
            if getattr(table[key], "__qualname__", "").startswith("swap_tensors."):
                del table[key]
            else:
                is_new = True
    return is_new


def tensors_of_modules(state: StateObjects) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers with the names of their entries in digests."""
    yield from ((f"parameters/{name}", item) for name, item in state.modules.named_parameters())
    yield from ((f"buffers/{name}", item) for name, item in state.modules.named_buffers())


def _tensors_with_nodes(state: StateObjects) -> dict[str, Tensor]:
    """Return the tensors of the state that may have graph nodes, by name."""
    tensors: dict[str, Any] = dict(tensors_of_modules(state))
    ids = {*map(id, tensors.values())}
    tensors |= {f"optimizer/{index}": item for index, item in enumerate(_trained(state)) if id(item) not in ids}
    for name, module in state.modules.named_modules():
        tensors |= nested(f"modules/{name}", module_attributes(module))
    tensors |= nested("loop", vars(state.loop))
    return {name: item for name, item in tensors.items() if isinstance(item, Tensor)}


def _separately_stored(state: StateObjects) -> dict[str, Any]:
    """Return, by name, objects that attributes may refer to and other parts store, such as modules and parameters."""
    objects: dict[str, Any] = {f"modules/{name}": module for name, module in state.modules.named_modules()}
    objects |= tensors_of_modules(state)
    objects |= {f"generators/{index}": generator for index, generator in enumerate(state.streams.owned)}
    return objects | {"optimizer": state.optimizer, "scheduler": state.scheduler}


def plain_forms(state: StateObjects) -> PlainForms:
    """Return the writer of plain forms for attributes of the model or the optimizer."""
    return PlainForms({id(thing): name for name, thing in _separately_stored(state).items()})


def from_plain_forms(state: StateObjects) -> FromPlainForms:
    """Return the reader that restores attributes from their plain forms."""
    return FromPlainForms(_separately_stored(state), device_of(state))


def device_of(state: StateObjects) -> torch.device:
    """Return the device of the model's first parameter."""
    return next(state.model.parameters()).device


class Modules(Part):
    """The attributes of modules other than tensors, modules and hooks."""

    name = "modules"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the class and the tables of every module, then its other attributes in plain form."""
        for name, module in state.modules.named_modules():
            yield f"modules/{name}", (type(module), *(tuple(vars(module)[table]) for table in TABLES))
        for name, form in self.store(state).items():
            yield from nested(f"modules/{name}", form)

    def watch(self, state: StateObjects) -> Watched:
        """Compare tables, classes and attributes of all modules; their sets of buffers that are not saved, if any."""
        modules = [*state.modules.modules()]
        # Without the tables of hooks, 11 of the 19 attributes of most modules: reading them would double the time.
        spaces = [vars(module) for module in modules]
        # Without a buffer, nothing reads the set.
        unsaved = [(UNSAVED_BUFFERS,) if module._buffers else () for module in modules]
        attributes: list[tuple[dict[str, Any], tuple[str, ...]]] = []
        for module, space, names in zip(modules, spaces, unsaved, strict=True):
            # The module that torch.compile returns stores no mode and shows that of the inner module.
            others = [key for key in module_attributes(module) if key == "training" or key not in MODULE_ATTRIBUTES]
            attributes.append((space, (*TABLES, *names, *others)))

        return Watched(
            [space[name] for space in spaces for name in TABLES],
            named_attributes=attributes,
            containers=[space[name] for space, names in zip(spaces, unsaved, strict=True) for name in names],
            read_values=partial(map, type, modules),
            names=[f"the class of modules/{name}" for name, _ in state.modules.named_modules()],
        )

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, Any]:
        """Return the plain forms of the attributes by name."""
        forms = plain_forms(state)
        return {
            f"{name}.{key}": forms.form_of(value)
            for name, module in state.modules.named_modules()
            for key, value in module_attributes(module).items()
        }

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Set the attributes of every module from their plain forms."""
        tables: dict[str, dict[str, Any]] = {name: {} for name, _ in state.modules.named_modules()}
        for name, form in stored.items():
            module_name, _, key = name.rpartition(".")
            tables[module_name][key] = form
        forms = from_plain_forms(state)
        for name, module in state.modules.named_modules():
            forms.restore_attributes(vars(module), tables[name], [*module_attributes(module)])

    def misfit(self, state: StateObjects, stored: Mapping[str, Any]) -> str:
        """Compare the names of the modules."""
        names = {name for name, _ in state.modules.named_modules()}
        differing_names = names ^ {name.rpartition(".")[0] for name in stored}
        return _describe_misfits("modules", sorted(differing_names))


def spaces_of_tensors(state: StateObjects) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ``__dict__`` of parameters and buffers with their names, without those of wrappers."""
    return ((name, space) for name, item in tensors_of_modules(state) if (space := space_of(item)) is not None)


class TensorAttributes(Part):
    """The attributes of parameters and buffers, such as counters and scales that ``forward`` writes."""

    name = "tensor attributes"

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, Any]:
        """Return the plain forms of the attributes of every tensor that has any."""
        forms = plain_forms(state)
        attributes = {name: tensor_attributes(space) for name, space in spaces_of_tensors(state)}
        return {name: forms.forms_of(values) for name, values in attributes.items() if values}

    def read(self, state: StateObjects) -> Leaves:
        """Yield the attributes in plain form."""
        return nested(self.name, self.store(state))

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Set the attributes from their plain forms."""
        forms, spaces = from_plain_forms(state), dict(spaces_of_tensors(state))
        for name in [*stored, *spaces]:  # in the order in which they were written
            if name in spaces:
                space = spaces.pop(name)
                forms.restore_attributes(space, stored.get(name, {}), [*tensor_attributes(space)])


def hook_tables(state: StateObjects) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the tables of hooks on parameters and modules with their names."""
    for name, parameter in state.modules.named_parameters():
        yield f"gradient hooks/{name}", _hooks_on_gradient(parameter) or {}
        yield f"gradient hooks/{name}/after", _hooks_after_gradient(parameter) or {}
    for name, module in state.modules.named_modules():
        for key, value in vars(module).items():
            if "_hooks" in key and is_hook_table(key, value):
                yield f"module hooks/{name}.{key}", value


def hook_contents(state: StateObjects) -> dict[str, Any]:
    """Return the keys and hooks of all tables that have any, in the order of their calls."""
    return {name: (*table.items(),) for name, table in hook_tables(state) if table}


class ModuleHooks(Part):
    """The hooks on modules, which a checkpoint stores as part of all hooks."""

    name = "module hooks"

    def watch(self, state: StateObjects) -> Watched:
        """Count the hooks in all tables, and compare the contents of those that have any."""
        places = [
            (vars(module), key, f"modules/{name}.{key}")
            for name, module in state.modules.named_modules()
            for key, value in vars(module).items()
            if is_hook_table(key, value)
        ]
        tables = [space[key] for space, key, _ in places]
        # A table that has hooks may be replaced, so it is read from its module.
        filled = [place for place in places if place[0][place[1]]]
        readers, names = [partial(space.get, key) for space, key, _ in filled], [name for *_, name in filled]
        return HookCounts(partial(iter, tables), "a hook on a module", readers, names).watched()


class Sharding(Part):
    """The state of FSDP2 outside of the model."""

    name = "sharding"
    has_temporary = True
    restored_first = True

    def keep(self, state: StateObjects, owners: list[Tensor]) -> ShardingState:
        """Return the contents of FSDP2's objects."""
        return state.sharding.save()

    def temporary(self, kept: ShardingState) -> Iterable[Any]:
        """Return the gradients that are not yet reduced."""
        return kept.pending()

    def restore(self, state: StateObjects, owners: list[Tensor], kept: ShardingState) -> None:
        """Restore the contents of FSDP2's objects."""
        state.sharding.restore(kept)

    def watch(self, state: StateObjects) -> Watched:
        """Compare pending work and settings, if the model is sharded."""
        label = "gathered parameters, pending work or settings of FSDP2"
        sharding = state.sharding
        if not sharding:
            return Watched()
        return Watched(read_values=sharding.read, label=label, restore=sharding.restore_settings)


MODEL_PARTS = (
    Parameters(),
    Buffers(),
    RequiresGrad(),
    Gradients(),
    GradientHooks(),
    NodeHooks(),
    Modules(),
    TensorAttributes(),
    ModuleHooks(),
    Sharding(),
)
