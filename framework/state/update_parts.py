"""The parts of a training state for optimizer, scheduler and hooks, and for the objects that they refer to."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .attributes import HOOK_TABLES, MODULE_ATTRIBUTES, is_hook_table, space_of, spaces_of_buffers, without_hooks
from .generators import StreamState
from .model_parts import GRADIENT_HOOKS, InternalHook, from_plain_forms, hook_tables, plain_forms
from .parameter_groups import SPLIT_FROM, groups_of, moments_of, original_groups, parameters_of, regrouped, trained_by
from .parts import Leaves, Part, StateObjects, Watched, nested
from .structure import ReachableObjects, Structure
from .values import ATOMS, Slots, attributes_of


def _is_object(value: Any) -> bool:
    return type(value) not in ATOMS and not isinstance(value, Tensor)


def _optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``state_dict`` leaves out; of a wrapper all attributes.

    A wrapper often shares the groups of the optimizers it wraps, and its ``load_state_dict`` would separate them.
    """
    attributes = without_hooks(attributes_of(optimizer) or {})
    left_out = {key: value for key, value in attributes.items() if key not in ("state", "param_groups")}
    others = ReachableObjects([left_out], excluded={id(optimizer)}).of_kind(Optimizer)
    return left_out if isinstance(optimizer, Optimizer) and not others else attributes


def _names_of(state: StateObjects) -> list[str]:
    """Return the names of the optimizer's parameters, in the order in which its state dict numbers them."""
    names = {id(parameter): name for name, parameter in state.modules.named_parameters()}
    parameters = enumerate(trained_by(state.optimizer))
    return [names.get(id(item), f"of the optimizer alone {index}") for index, item in parameters]


def _optimizer_state(state: StateObjects) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names as keys and the original groups."""
    optimizer = state.optimizer
    if not isinstance(optimizer, Optimizer) or "state" in _optimizer_attributes(optimizer):
        return {}
    content, names, groups = optimizer.state_dict(), dict(enumerate(_names_of(state))), dict[int, dict[str, Any]]()
    for origin, group in zip(original_groups(optimizer), content["param_groups"], strict=True):
        combined = groups.setdefault(origin, {**group, "params": []})
        combined.pop(SPLIT_FROM, None)
        combined["params"] += [names[index] for index in group["params"]]
    by_name = {names.get(index, index): value for index, value in content["state"].items()}
    return {**content, "state": by_name, "param_groups": [*groups.values()]}


def optimizers_of(state: StateObjects) -> list[Optimizer]:
    """Return the optimizer, if it is a torch optimizer, and the optimizers that it wraps."""
    wrapped = ReachableObjects(
        [*_optimizer_attributes(state.optimizer).values()],
        excluded={*map(id, state.modules.modules()), id(state.optimizer)},
    )
    return [state.optimizer] * isinstance(state.optimizer, Optimizer) + wrapped.of_kind(Optimizer)


def _hooks(state: StateObjects) -> Iterator[tuple[str, list[Any]]]:
    """Yield the hooks of each table that has any, without internal hooks, which change nothing undeclared.

    Hooks of ``torch.distributed`` are left out too: they only determine the layout of parameters on the ranks.
    """
    optimizer = attributes_of(state.optimizer) or {}
    on_optimizer = ((f"optimizer/{key}", table) for key, table in optimizer.items() if is_hook_table(key, table))
    for name, table in chain(hook_tables(state), on_optimizer):
        hooks = [hook for hook in table.values() if not (isinstance(hook, InternalHook) or _is_torch_distributed(hook))]
        if hooks:
            yield name, hooks


def _is_torch_distributed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _forms_of_hooks(state: StateObjects) -> dict[str, list[Any]]:
    """Return the plain forms of the hooks by the names of their tables."""
    if not (present := [*_hooks(state)]):
        return {}  # the most frequent case
    forms = plain_forms(state)
    return {name: [forms.form_of(hook) for hook in hooks] for name, hooks in present}


def _has_state(form: Any) -> bool:
    """Return whether a hook's plain form has a state: it is neither only code nor one of torch's flags for hooks."""
    return isinstance(form, Mapping) and form.keys() not in ({"code"}, set())


def reachable_from_modules(modules: list[nn.Module], others: Iterable[Any], excluded: Iterable[Any]) -> Structure:
    """Walk the contents of all modules of a model, of hooks on them and on parameters, and of ``others``."""
    tables = [module._parameters for module in modules if module._parameters]
    parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
    roots = [value for module in modules for value in extra_attributes(module)]
    roots += [slots for module in modules if (slots := Slots.of(module)) is not None]
    roots += [space for space in map(space_of, parameters) if space is not None]
    roots += chain.from_iterable(map(spaces_of_buffers, modules))
    on_modules = filter(None, chain.from_iterable([map(vars(module).get, HOOK_TABLES) for module in modules]))
    on_parameters = filter(None, chain.from_iterable([map(read, parameters) for read in GRADIENT_HOOKS]))
    roots += [hook for table in chain(on_modules, on_parameters) for hook in table.values()]
    return Structure([*roots, *others], excluded={*map(id, modules), *map(id, parameters), *map(id, excluded)})


def extra_attributes(module: nn.Module) -> list[Any]:
    """Return the attributes of a module, without numbers and its tables of tensors, modules and hooks."""
    return [value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES and type(value) not in ATOMS]


def _extra_structure(state: StateObjects) -> Structure:
    """Walk the objects of modules, hooks, optimizer and scheduler that no other part names."""
    optimizer = state.optimizer
    others: list[Any] = [attributes_of(optimizer) or {}]
    excluded: list[Any] = [optimizer, state.scheduler]
    if isinstance(optimizer, Optimizer):
        # The part "optimizer" watches these; a misbehaving hook may have deleted them.
        excluded += [getattr(optimizer, name, None) for name in ("state", "param_groups")]
        moments = [item for item in moments_of(optimizer).values() if isinstance(item, dict)]
        others += [value for item in moments for value in item.values() if _is_object(value)]
        others += [item for item in moments_of(optimizer).values() if not isinstance(item, dict)]
    # A scheduler's lists of numbers are new objects after each step; the part "scheduler" compares them by value.
    others += [value for value in (attributes_of(state.scheduler) or {}).values() if not _is_plain_list(value)]
    return reachable_from_modules([*state.modules.modules()], others, excluded)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in ATOMS or isinstance(item, Tensor) for item in value)


class OptimizerPart(Part):
    """The optimizer's groups and its state of every parameter; empty for an object that is no torch optimizer."""

    name = "optimizer"
    has_temporary = True

    def read(self, state: StateObjects) -> Leaves:
        """Yield the state of every parameter, then the options of every group."""
        if not isinstance(state.optimizer, Optimizer):
            return
        names = {id(parameter): name for name, parameter in state.modules.named_parameters()}
        forms = plain_forms(state)
        for parameter, moments in moments_of(state.optimizer).items():
            name = names.get(id(parameter), "unknown")
            if isinstance(moments, Mapping):
                moments = {key: forms.form_of(item) if _is_object(item) else item for key, item in moments.items()}
            yield from nested(f"optimizer/{name}", moments)
        for index, group in enumerate(groups_of(state.optimizer)):
            yield f"optimizer/group {index}/params", [names.get(id(item), "unknown") for item in parameters_of(group)]
            for key, option in group.items() if isinstance(group, dict) else ():
                if key != "params":
                    yield from nested(f"optimizer/group {index}/{key}", option)

    def persistent(self, state: StateObjects) -> Iterable[Any]:
        """Return the optimizer and its lists of parameters."""
        return (state.optimizer, *map(parameters_of, groups_of(state.optimizer)))

    def excluded(self, state: StateObjects) -> Iterable[Any]:
        """Return the groups, whose options a scheduler changes at every step."""
        return groups_of(state.optimizer)

    def keep(self, state: StateObjects, owners: list[Tensor]) -> tuple[dict[str, Any], ...]:
        """Return the groups."""
        return (*groups_of(state.optimizer),)

    def temporary(self, kept: tuple[dict[str, Any], ...]) -> Iterable[Any]:
        """Return the groups."""
        return kept

    def watch(self, state: StateObjects) -> Watched:
        """Compare the tables of the state, the groups with their options, and the lists of parameters."""
        optimizers = optimizers_of(state)
        groups = [group for optimizer in optimizers for group in groups_of(optimizer) if isinstance(group, dict)]
        states = [moments_of(optimizer) for optimizer in optimizers]
        tables = [table for moments in states for table in (moments, *moments.values())]
        return Watched(
            [table for table in tables if isinstance(table, dict)],
            named_attributes=[(vars(optimizer), ("state", "param_groups")) for optimizer in optimizers],
            containers=[item for item in map(groups_of, optimizers) if isinstance(item, list)],
            spaces=groups,
            read_values=partial(chain.from_iterable, [*map(parameters_of, groups)]) if groups else None,
            label="the optimizer's hyper-parameters or groups",
        )

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, Any]:
        """Return the optimizer's state dict with the names of parameters instead of numbers."""
        return _optimizer_state(state)

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Load the state dict, with the numbers and groups of this optimizer."""
        if stored:
            optimizer, numbers = state.optimizer, {name: number for number, name in enumerate(_names_of(state))}
            present = optimizer.state_dict()["param_groups"]
            of_split = [{SPLIT_FROM: group[SPLIT_FROM]} if SPLIT_FROM in group else {} for group in present]
            groups = [
                {**stored["param_groups"][origin], "params": group["params"], **split}
                for origin, group, split in zip(original_groups(optimizer), present, of_split, strict=True)
            ]
            by_number = {numbers.get(name, name): value for name, value in stored["state"].items()}
            optimizer.load_state_dict({**stored, "state": by_number, "param_groups": groups})

    def misfit(self, state: StateObjects, stored: Mapping[str, Any]) -> str:
        """Compare the parameters of the groups."""
        if not stored:  # a wrapper around optimizers, whose states are attributes
            return ""
        present = [sorted(group["params"]) for group in _optimizer_state(state)["param_groups"]]
        if present != [sorted(group["params"]) for group in stored["param_groups"]]:
            return "was written for another optimizer: the parameters of its groups differ"
        return ""


class OptimizerAttributes(Part):
    """The attributes of the optimizer that its ``state_dict`` leaves out."""

    name = "optimizer attributes"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the attributes in plain form."""
        return nested("optimizer", self.store(state))

    def store(self, state: StateObjects, streams: StreamState | None = None) -> dict[str, Any]:
        """Return the plain forms."""
        return plain_forms(state).forms_of(_optimizer_attributes(state.optimizer))

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Set the attributes from their plain forms."""
        space = attributes_of(state.optimizer) or {}
        from_plain_forms(state).restore_attributes(space, stored, [*_optimizer_attributes(state.optimizer)])


class SchedulerPart(Part):
    """The attributes of the scheduler, in plain form."""

    name = "scheduler"
    has_temporary = True

    def _forms(self, state: StateObjects) -> dict[str, Any]:
        return plain_forms(state).forms_of(attributes_of(state.scheduler) or {})

    def read(self, state: StateObjects) -> Leaves:
        """Yield the attributes in plain form."""
        return nested("scheduler", self._forms(state))

    def keep(self, state: StateObjects, owners: list[Tensor]) -> Any:
        """Return the scheduler."""
        return state.scheduler

    def watch(self, state: StateObjects) -> Watched:
        """Compare the attributes by value."""
        attributes = attributes_of(state.scheduler)
        return Watched(spaces=[attributes], label="the scheduler") if attributes else Watched()

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, Any]:
        """Return the plain forms with one item per original group, independent of how ranks split the groups."""
        origins, forms = original_groups(state.optimizer), self._forms(state)
        once = [origins.index(origin) for origin in dict.fromkeys(origins)]
        return forms if len(once) == len(origins) else dict(regrouped(forms, len(origins), once))

    def load(self, state: StateObjects, stored: Mapping[str, Any]) -> None:
        """Set the attributes, with one item per group of this rank."""
        space, origins = attributes_of(state.scheduler) or {}, original_groups(state.optimizer)
        if len({*origins}) < len(origins):
            stored = regrouped(stored, len({*origins}), origins)
        from_plain_forms(state).restore_attributes(space, stored, [*space])

    def misfit(self, state: StateObjects, stored: Mapping[str, Any]) -> str:
        """Compare names, and references to objects that are stored elsewhere, such as the optimizer."""
        now = self.store(state, state.streams.save())
        # Names are of objects stored elsewhere, such as the optimizer; numbers are of lists that two schedulers share.
        shared = [key for key, form in now.items() if isinstance(form, dict) and isinstance(form.get("again"), str)]
        if missing := [key for key in now if key not in stored or (key in shared and stored[key] != now[key])]:
            return f"does not fit this run: its scheduler lacks {missing[0]}"
        return ""


class Hooks(Part):
    """The hooks on parameters, modules and the optimizer, with their states."""

    name = "hooks"

    def read(self, state: StateObjects) -> Leaves:
        """Yield the plain forms of all hooks."""
        for name, forms in _forms_of_hooks(state).items():
            yield from nested(name, forms)

    def store(self, state: StateObjects, streams: StreamState) -> dict[str, list[Any]]:
        """Return the forms of the hooks that have a state; building the model recreates the others."""
        return {name: forms for name, forms in _forms_of_hooks(state).items() if any(map(_has_state, forms))}

    def load(self, state: StateObjects, stored: Mapping[str, list[Any]]) -> None:
        """Restore the states of the hooks."""
        present, forms = dict(_hooks(state)), from_plain_forms(state)
        for name, stored_forms in stored.items():
            forms.values_of(stored_forms, present.get(name, []))


class ExtraContents(Part):
    """The objects of modules, hooks, optimizer and scheduler that no other part names; only the tripwire needs them."""

    name = "contents of modules, hooks, optimizer and scheduler"

    def watch(self, state: StateObjects) -> Watched:
        """Compare the contents of containers, and the states of arrays and generators."""
        structure = _extra_structure(state)
        owned = {*map(id, state.streams.owned)}
        structure.natives = [value for value in structure.natives if id(value) not in owned]
        return Watched(
            containers=[*structure.containers(), *structure.keys_with_tensors()],
            read_values=structure.read_natives if structure.natives else None,
            label="an array or a random generator of a module, the optimizer or the scheduler",
        )


UPDATE_PARTS = (OptimizerPart(), OptimizerAttributes(), SchedulerPart(), Hooks(), ExtraContents())
