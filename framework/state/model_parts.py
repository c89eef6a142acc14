"""The parts of a training state that belong to the model: tensors, gradients, modules and hooks."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .attributes import NATIVE, TABLES, FromPlainForms, PlainForms, is_hook_table, module_attributes
from .objects import Transient
from .parts import NOT_GUARDED, Guarded, Leaves, Part, StateObjects, Stored, Watched, nested
from .tensor_identity import addresses

_grad = attrgetter("grad")
_requires_grad = attrgetter("requires_grad")
# The tables of register_hook and register_post_accumulate_grad_hook; torch has no public function that lists hooks.
_hooks_on_gradient = attrgetter("_backward_hooks")
_hooks_after_gradient = attrgetter("_post_accumulate_grad_hooks")
GRADIENT_HOOKS = (_hooks_on_gradient, _hooks_after_gradient)
_parameters, _buffers = methodcaller("named_parameters"), methodcaller("named_buffers")


class InternalHook(Transient):
    """Base of the hooks that loopscope registers on parameters and modules; they change nothing undeclared.

    Hooks that users register there belong to the training state, since the run may depend on them. Internal hooks do
    not: a run with them and a run without them have the same digests.
    """


class InternalFunction(InternalHook):
    """A function that loopscope registers as a hook of a parameter or module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        return self._function(*arguments)


def _tensor_part(
    part: str,
    named: Callable[[nn.Module], Iterable[tuple[str, Any]]],
    read: Callable[[Any], Any],
    load: Callable[[Any, Any], object],
    guarded: Guarded = NOT_GUARDED,
    watched: Callable[[StateObjects], Watched] = lambda state: Watched(),
) -> Part:
    """Return the part with one value for each of the model's parameters or buffers."""

    def values(state: StateObjects, _: Any = None) -> dict[str, Any]:
        return {name: read(tensor) for name, tensor in named(state.model)}

    def leaves(state: StateObjects) -> Leaves:
        return ((f"{part}/{name}", value) for name, value in values(state).items())

    @torch.no_grad()
    def load_all(state: StateObjects, stored: Mapping[str, Any]) -> None:
        for name, tensor in named(state.model):
            load(tensor, stored[name])

    def misfit(state: StateObjects, stored: Mapping[str, Any]) -> str:
        present = dict(named(state.model))
        misfits = [name for name, value in stored.items() if name in present and not _fits(value, present[name])]
        return _describe_misfits(part, sorted(present.keys() ^ stored.keys()) or sorted(misfits))

    return Part(part, leaves, guarded, watched, Stored(values, load_all, misfit))


def _fits(value: Any, tensor: Tensor) -> bool:
    return not isinstance(value, Tensor) or (value.shape, value.dtype) == (tensor.shape, tensor.dtype)


def _describe_misfits(part: str, names: Sequence[str]) -> str:
    return f"was written for another model: its {part} differ ({', '.join(names[:5])})" if names else ""


def _set_gradient(parameter: Any, gradient: Tensor | None) -> None:
    # Checkpoints are read to the CPU, but a gradient must be on the device of its parameter.
    parameter.grad = None if gradient is None else gradient.to(parameter.device)


def _restore_gradients(owners: list[Tensor], saved: tuple[Tensor | None, ...]) -> None:
    # Compared first, since setting a gradient checks its device, dtype and layout every time.
    if addresses(saved) != addresses((*map(_grad, owners),)):
        for owner, gradient in zip(owners, saved, strict=True):
            owner.grad = gradient


def _watch_parameters(state: StateObjects) -> Watched:
    parameters = [*state.model.parameters()]

    def restore(previous: tuple[bool, ...]) -> None:
        for parameter, required in zip(parameters, previous, strict=True):
            parameter.requires_grad_(required)

    read_values = partial(map, _requires_grad, parameters)
    return Watched(read_values=read_values, label="requires_grad of a parameter", restore=restore)


def _watch_gradients(state: StateObjects) -> Watched:
    parameters: list[Tensor] = [*state.model.parameters()]
    return Watched(
        read_tensors=partial(map, _grad, parameters),
        label="a gradient was replaced",
        restore=lambda previous: _restore_gradients(parameters, previous),
    )


def _watch_gradient_hooks(state: StateObjects) -> Watched:
    parameters = [*state.model.parameters()]
    tables = lambda: chain(map(_hooks_on_gradient, parameters), map(_hooks_after_gradient, parameters))
    counts = HookCounts(tables)
    return Watched(read_values=counts.read, label="a hook on a parameter", restore=counts.remove_newer)


class HookCounts:
    """Counts hooks; counts them again only if torch has created a handle since the last reading."""

    def __init__(self, tables: Callable[[], Iterable[dict[int, Any] | None]]) -> None:
        self._tables = tables
        self._handles = -1
        self._counts: tuple[int, ...] = ()

    def read(self) -> tuple[int, ...]:
        """Return the number of hooks in each table that is not empty."""
        # next_id is undocumented: torch numbers handles consecutively, and a handle's number is the key of its hook.
        if RemovableHandle.next_id != self._handles:
            self._handles, self._counts = RemovableHandle.next_id, (*map(len, filter(None, self._tables())),)
        return self._counts

    def remove_newer(self, _: Any = None) -> None:
        """Remove the hooks whose handles were created since the last reading, as ``handle.remove()`` would."""
        for table in filter(None, self._tables()):
            for number in [number for number in table if number >= self._handles]:
                del table[number]


def _separately_stored(state: StateObjects) -> dict[str, Any]:
    """Return, by name, objects that attributes may refer to and other parts store, such as modules and parameters."""
    objects: dict[str, Any] = {f"modules/{name}": module for name, module in state.model.named_modules()}
    objects |= {f"parameters/{name}": parameter for name, parameter in state.model.named_parameters()}
    objects |= {f"buffers/{name}": buffer for name, buffer in state.model.named_buffers()}
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


def attribute_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    """Return the plain forms, by name, of the attributes of modules other than tensors, modules and hooks."""
    forms = plain_forms(state)
    return {
        f"{name}.{key}": forms.of(value)
        for name, module in state.model.named_modules()
        for key, value in module_attributes(module).items()
    }


def _module_leaves(state: StateObjects) -> Leaves:
    for name, module in state.model.named_modules():
        yield f"modules/{name}", (type(module), *(tuple(vars(module)[table]) for table in TABLES))
    for name, form in attribute_forms(state).items():
        yield from nested(f"modules/{name}", form)


def _load_attributes(state: StateObjects, stored: Mapping[str, Any]) -> None:
    tables: dict[str, dict[str, Any]] = {name: {} for name, _ in state.model.named_modules()}
    for name, form in stored.items():
        module, _, key = name.rpartition(".")
        tables[module][key] = form
    forms = from_plain_forms(state)
    for name, module in state.model.named_modules():
        forms.fill(vars(module), tables[name], [*module_attributes(module)])


def _misfit_of_modules(state: StateObjects, stored: Mapping[str, Any]) -> str:
    names = {name for name, _ in state.model.named_modules()}
    differing_names = names ^ {name.rpartition(".")[0] for name in stored}
    forms = plain_forms(state).table(module_attributes(nn.Module()))  # every module needs the attributes that all have
    missing = [
        f"{name}.{key}"
        for name, module in state.model.named_modules()
        for key, form in forms.items()
        if key in vars(module) and not _same_kind(stored.get(f"{name}.{key}"), form)
    ]
    return _describe_misfits("modules", sorted(differing_names or missing))


def _same_kind(stored: Any, form: Any) -> bool:
    """Return whether two plain forms are of the same kind, regardless of their contents."""
    return type(stored) is type(form) and (
        not isinstance(form, dict) or "again" in stored or stored.keys() == form.keys()
    )


def _watch_modules(state: StateObjects) -> Watched:
    modules = [*state.model.modules()]
    # Without the tables of hooks, 11 of the 19 attributes of most modules: reading them would double the time.
    spaces = [vars(module) for module in modules]
    attributes = [
        # The module that torch.compile returns stores no mode and shows that of the inner module.
        (space, tuple([*TABLES, *(key for key in module_attributes(module) if key == "training" or key not in NATIVE)]))
        for module, space in zip(modules, spaces, strict=True)
    ]
    return Watched(
        [space[name] for space in spaces for name in TABLES],
        named_attributes=attributes,
        read_values=partial(map, type, modules),
        label="the class of a module",
    )


def hook_tables(state: StateObjects) -> Iterator[tuple[str, Mapping[Any, Any]]]:
    """Yield the tables of hooks on parameters and modules with their names."""
    for name, parameter in state.model.named_parameters():
        yield f"gradient hooks/{name}", _hooks_on_gradient(parameter) or {}
        yield f"gradient hooks/{name}/after", _hooks_after_gradient(parameter) or {}
    yield from _module_hook_tables(state)


def _module_hook_tables(state: StateObjects) -> Iterator[tuple[str, dict[Any, Any]]]:
    for name, module in state.model.named_modules():
        for key, value in vars(module).items():
            if is_hook_table(key, value):
                yield f"module hooks/{name}.{key}", value


def _watch_module_hooks(state: StateObjects) -> Watched:
    tables = [table for _, table in _module_hook_tables(state)]
    filled = [table for table in tables if table]
    counts = HookCounts(lambda: tables)
    return Watched(
        filled,
        read_values=counts.read,
        label="a hook on a module",
        decides_containers=True,
        restore=counts.remove_newer,
    )


def _watch_sharding(state: StateObjects) -> Watched:
    label = "gathered parameters, pending work or settings of FSDP2"
    sharding = state.sharding
    return Watched(read_values=sharding.read, label=label, restore=sharding.restore_settings) if sharding else Watched()


MODEL_PARTS = (
    _tensor_part("parameters", _parameters, lambda tensor: tensor, Tensor.copy_, Guarded(lambda state: (state.model,))),
    _tensor_part("buffers", _buffers, lambda tensor: tensor, Tensor.copy_),
    _tensor_part("requires_grad", _parameters, _requires_grad, nn.Parameter.requires_grad_, watched=_watch_parameters),
    _tensor_part(
        "gradients",
        _parameters,
        _grad,
        _set_gradient,
        Guarded(
            save=lambda state, owners: (*map(_grad, owners),),
            temporary=lambda saved: saved,
            restore=lambda state, owners, saved: _restore_gradients(owners, saved),
        ),
        _watch_gradients,
    ),
    Part("gradient hooks", lambda state: (), watched=_watch_gradient_hooks),
    Part(
        "modules",
        _module_leaves,
        watched=_watch_modules,
        stored=Stored(attribute_forms, _load_attributes, _misfit_of_modules),
    ),
    Part("module hooks", lambda state: (), watched=_watch_module_hooks),
    Part(
        "sharding",
        lambda state: (),
        Guarded(
            save=lambda state, owners: state.sharding.save(),
            temporary=lambda saved: saved.pending(),
            restore=lambda state, owners, saved: state.sharding.restore(saved),
            restored_first=True,
        ),
        _watch_sharding,
    ),
)
