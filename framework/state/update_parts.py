"""The parts of a training state for optimizer, scheduler and hooks, and for the objects that they refer to."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .attributes import HOOK_TABLES, NATIVE, is_hook_table, without_hooks
from .model_parts import GRADIENT_HOOKS, InternalHook, from_plain_forms, hook_tables, plain_forms
from .objects import ATOMS, attributes_of
from .parts import Guarded, Leaves, Part, StateObjects, Stored, Watched, nested, with_types
from .structure import Structure

SPLIT_FROM = "split_from"
"""Key of a parameter group that gives the index of the original group, before ranks split it."""
BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Attributes of torch's schedulers that are lists with one item per parameter group."""


def is_torch_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is a ``torch.optim.Optimizer``; otherwise it wraps others, or has no such state."""
    return isinstance(optimizer, Optimizer)


def _optimizer_leaves(state: StateObjects) -> Leaves:
    if not is_torch_optimizer(state.optimizer):
        return
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    forms = plain_forms(state)
    for parameter, moments in state.optimizer.state.items():
        yield from nested(f"optimizer/{names.get(parameter, 'unknown')}", _with_forms_of_objects(moments, forms))
    for index, group in enumerate(state.optimizer.param_groups):
        yield f"optimizer/group {index}/params", [names.get(item, "unknown") for item in group["params"]]
        for key, option in group.items():
            if key != "params":
                yield from nested(f"optimizer/group {index}/{key}", option)


def _with_forms_of_objects(moments: Any, forms: Any) -> Any:
    """Return an optimizer's state of one parameter, with plain forms for objects."""
    if not isinstance(moments, Mapping):
        return moments
    return {key: forms.of(value) if _is_object(value) else value for key, value in moments.items()}


def _is_object(value: Any) -> bool:
    return type(value) not in ATOMS and not isinstance(value, Tensor)


def _optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``state_dict`` leaves out; of a wrapper all attributes.

    A wrapper often shares the groups of the optimizers it wraps, and its ``load_state_dict`` would separate them.
    """
    attributes = without_hooks(attributes_of(optimizer) or {})
    left_out = {key: value for key, value in attributes.items() if key not in ("state", "param_groups")}
    stands_alone = is_torch_optimizer(optimizer) and not Structure([left_out], excluded={id(optimizer)}).of_kind(
        Optimizer
    )
    return left_out if stands_alone else attributes


def _names_of(state: StateObjects) -> list[str]:
    """Return the names of the optimizer's parameters, in the order in which its state dict numbers them."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    parameters = [item for group in state.optimizer.param_groups for item in group["params"]]
    return [names.get(id(item), f"of the optimizer alone {index}") for index, item in enumerate(parameters)]


def _origins(optimizer: Any) -> list[int]:
    """Return, for each group of an optimizer, the index of its original group before ranks split it."""
    groups = optimizer.param_groups if is_torch_optimizer(optimizer) else []
    return [group.get(SPLIT_FROM, index) for index, group in enumerate(groups)]


def _optimizer_state(state: StateObjects, _: Any = None) -> dict[str, Any]:
    """Return an optimizer's state dict with parameter names as keys and the original groups."""
    optimizer = state.optimizer
    if not is_torch_optimizer(optimizer) or "state" in _optimizer_attributes(optimizer):
        return {}
    content, names, groups = optimizer.state_dict(), dict(enumerate(_names_of(state))), dict[int, dict[str, Any]]()
    for origin, group in zip(_origins(optimizer), content["param_groups"], strict=True):
        combined = groups.setdefault(origin, {**group, "params": []})
        combined.pop(SPLIT_FROM, None)
        combined["params"] += [names[index] for index in group["params"]]
    by_name = {names.get(index, index): value for index, value in content["state"].items()}
    return {**content, "state": by_name, "param_groups": [*groups.values()]}


def _load_optimizer(state: StateObjects, stored: Mapping[str, Any]) -> None:
    if stored:
        optimizer, numbers = state.optimizer, {name: number for number, name in enumerate(_names_of(state))}
        present = optimizer.state_dict()["param_groups"]
        of_split = [{SPLIT_FROM: group[SPLIT_FROM]} if SPLIT_FROM in group else {} for group in present]
        groups = [
            {**stored["param_groups"][origin], "params": group["params"], **split}
            for origin, group, split in zip(_origins(optimizer), present, of_split, strict=True)
        ]
        by_number = {numbers.get(name, name): value for name, value in stored["state"].items()}
        optimizer.load_state_dict({**stored, "state": by_number, "param_groups": groups})


def _misfit_of_optimizer(state: StateObjects, stored: Mapping[str, Any]) -> str:
    if not stored:  # a wrapper around optimizers, whose states are attributes
        return ""
    present = [sorted(group["params"]) for group in _optimizer_state(state)["param_groups"]]
    if present != [sorted(group["params"]) for group in stored["param_groups"]]:
        return "was written for another optimizer: the parameters of its groups differ"
    return _misfit_of_fused(state, stored)


def _regroup(form: Any, count: int, places: Sequence[int]) -> Any:
    """Return a scheduler's plain form whose lists with one item per group (``count``) have the items at ``places``."""
    if isinstance(form, list):
        return [_regroup(item, count, places) for item in form]
    if not isinstance(form, Mapping):
        return form
    regrouped = {key: _regroup(item, count, places) for key, item in form.items()}
    for key in BY_GROUP & regrouped.keys():
        if isinstance(form[key], Mapping) and len(items := form[key].get("list", ())) == count:
            regrouped[key] = {"list": [items[place] for place in places]}
    return regrouped


def _watch_optimizer(state: StateObjects) -> Watched:
    optimizers = optimizers_of(state)

    def options() -> list[Any]:
        hyper_parameters: list[Any] = []
        for optimizer in optimizers:
            hyper_parameters += [optimizer.state, optimizer.param_groups]
            for group in optimizer.param_groups:
                hyper_parameters += with_types(group.values())
                hyper_parameters += group["params"]
        return hyper_parameters

    tables = [table for optimizer in optimizers for table in (optimizer.state, *optimizer.state.values())]
    return Watched(
        [table for table in tables if isinstance(table, dict)],
        read_values=options,
        label="the optimizer's hyper-parameters or groups",
    )


def optimizers_of(state: StateObjects) -> list[Optimizer]:
    """Return the optimizer, if it is a torch optimizer, and the optimizers that it wraps."""
    wrapped = Structure(
        [*_optimizer_attributes(state.optimizer).values()],
        excluded={*map(id, state.model.modules()), id(state.optimizer)},
    )
    return [state.optimizer] * is_torch_optimizer(state.optimizer) + wrapped.of_kind(Optimizer)


def _optimizer_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(_optimizer_attributes(state.optimizer))


def _load_optimizer_forms(state: StateObjects, stored: Mapping[str, Any]) -> None:
    space = attributes_of(state.optimizer) or {}
    from_plain_forms(state).fill(space, stored, [*_optimizer_attributes(state.optimizer)])


def _scheduler_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(attributes_of(state.scheduler) or {})


def _stored_scheduler(state: StateObjects, _: Any = None) -> dict[str, Any]:
    """Return the plain forms with one item per original group, independent of how ranks split the groups."""
    origins, forms = _origins(state.optimizer), _scheduler_forms(state)
    once = [origins.index(origin) for origin in dict.fromkeys(origins)]
    return forms if len(once) == len(origins) else dict(_regroup(forms, len(origins), once))


def _load_scheduler_forms(state: StateObjects, stored: Mapping[str, Any]) -> None:
    space, origins = attributes_of(state.scheduler) or {}, _origins(state.optimizer)
    if len({*origins}) < len(origins):
        stored = _regroup(stored, len({*origins}), origins)
    from_plain_forms(state).fill(space, stored, [*space])


def _watch_scheduler(state: StateObjects) -> Watched:
    attributes = attributes_of(state.scheduler) or {}
    return (
        Watched(read_values=lambda: with_types(attributes.values()), label="the scheduler") if attributes else Watched()
    )


def _hooks(state: StateObjects) -> Iterator[tuple[str, list[Any]]]:
    """Yield the hooks of each table that has any, without internal hooks, which change nothing undeclared.

    Hooks of ``torch.distributed`` are left out too: they only determine the layout of parameters on the ranks.
    """
    optimizer = attributes_of(state.optimizer) or {}
    on_optimizer = ((f"optimizer/{key}", table) for key, table in optimizer.items() if is_hook_table(key, table))
    for name, table in chain(hook_tables(state), on_optimizer):
        if table and (
            hooks := [
                hook for hook in table.values() if not (isinstance(hook, InternalHook) or _is_torch_distributed(hook))
            ]
        ):
            yield name, hooks


def _is_torch_distributed(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _hook_leaves(state: StateObjects) -> Leaves:
    for name, forms in _forms_of_hooks(state).items():
        yield from nested(name, forms)


def _forms_of_hooks(state: StateObjects) -> dict[str, list[Any]]:
    """Return the plain forms of the hooks by the names of their tables."""
    if not (present := [*_hooks(state)]):
        return {}  # the most frequent case
    forms = plain_forms(state)
    return {name: [forms.of(hook) for hook in hooks] for name, hooks in present}


def _hook_forms(state: StateObjects, _: Any = None) -> dict[str, list[Any]]:
    """Return the forms of the hooks that have a state; building the model recreates the others."""
    return {name: forms for name, forms in _forms_of_hooks(state).items() if any(map(_has_state, forms))}


def _has_state(form: Any) -> bool:
    """Return whether a hook's plain form has a state: it is neither only code nor one of torch's flags for hooks."""
    return isinstance(form, Mapping) and form.keys() not in ({"code"}, set())


def _load_hook_forms(state: StateObjects, stored: Mapping[str, list[Any]]) -> None:
    present, forms = dict(_hooks(state)), from_plain_forms(state)
    for name, stored_forms in stored.items():
        forms.items(stored_forms, present.get(name, []))


def reachable_from_modules(
    modules: list[nn.Module], others: Iterable[Any] = (), excluded: Iterable[Any] = ()
) -> Structure:
    """Walk the contents of all modules of a model, of hooks on them and on parameters, and of ``others``."""
    tables = [module._parameters for module in modules if module._parameters]
    parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
    roots = [value for module in modules for value in extra_attributes(module)]
    on_modules = filter(None, chain.from_iterable([map(vars(module).get, HOOK_TABLES) for module in modules]))
    on_parameters = filter(None, chain.from_iterable([map(read, parameters) for read in GRADIENT_HOOKS]))
    roots += [hook for table in chain(on_modules, on_parameters) for hook in table.values()]
    return Structure([*roots, *others], excluded={*map(id, modules), *map(id, parameters), *map(id, excluded)})


def extra_attributes(module: nn.Module) -> list[Any]:
    """Return the attributes of a module, without numbers and its tables of tensors, modules and hooks."""
    return [value for key, value in vars(module).items() if key not in NATIVE and type(value) not in ATOMS]


def _extra_structure(state: StateObjects) -> Structure:
    """Walk the objects of modules, hooks, optimizer and scheduler that no other part names."""
    optimizer = state.optimizer
    others: list[Any] = [attributes_of(optimizer) or {}]
    excluded: list[Any] = [optimizer, state.scheduler]
    if is_torch_optimizer(optimizer):
        excluded += [optimizer.state, optimizer.param_groups]  # the part "optimizer" watches these
        moments = [item for item in optimizer.state.values() if isinstance(item, dict)]
        others += [value for item in moments for value in item.values() if _is_object(value)]
        others += [item for item in optimizer.state.values() if not isinstance(item, dict)]
    # A scheduler's lists of numbers are new objects after each step; the part "scheduler" compares them by value.
    others += [value for value in (attributes_of(state.scheduler) or {}).values() if not _is_plain_list(value)]
    return reachable_from_modules([*state.model.modules()], others, excluded)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in ATOMS or isinstance(item, Tensor) for item in value)


def _watch_extra_structure(state: StateObjects) -> Watched:
    structure = _extra_structure(state)
    owned = {*map(id, state.streams.owned)}
    structure.natives = [value for value in structure.natives if id(value) not in owned]
    return Watched(
        containers=structure.containers(),
        read_values=structure.read_natives if structure.natives else None,
        label="an array or a random generator of a module, the optimizer or the scheduler",
    )


def numbers_missing(name: str, now: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Return which number in ``now`` is not stored as a number, as an error message; empty if all are."""
    numbers = [key for key, value in now.items() if isinstance(value, (int, float))]
    misfits = [key for key in numbers if not _is_number(stored.get(key))]
    return f"does not fit this run: {misfits[0]} of the {name} is not a number" if misfits else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _misfit_of_scheduler(state: StateObjects, stored: Mapping[str, Any]) -> str:
    now = _stored_scheduler(state)
    # References to objects that are stored elsewhere, such as the optimizer.
    shared = [key for key, form in now.items() if isinstance(form, dict) and "again" in form]
    if missing := [key for key in now if key not in stored or (key in shared and stored[key] != now[key])]:
        return f"does not fit this run: its scheduler lacks {missing[0]}"
    return numbers_missing("scheduler", now, stored)


def _misfit_of_fused(state: StateObjects, stored: Mapping[str, Any]) -> str:
    # torch's fused kernels do not compare sizes of moments and parameters: they write past the end of small moments.
    tensors = [item for group in state.optimizer.param_groups for item in group["params"]]
    parameters = dict(zip(_names_of(state), tensors, strict=True))
    fused = [name for group in stored["param_groups"] if group.get("fused") for name in group["params"]]
    for parameter in fused:
        for name, value in stored["state"].get(parameter, {}).items():
            shape = () if name == "step" else parameters[parameter].shape
            if not isinstance(value, Tensor) or value.shape != shape:
                return f"does not fit this run: the optimizer's {name} of {parameter} has the wrong shape"
    return ""


UPDATE_PARTS = (
    Part(
        "optimizer",
        _optimizer_leaves,
        Guarded(
            lambda state: (state.optimizer, *[group["params"] for group in state.optimizer.param_groups]),
            excluded=lambda state: state.optimizer.param_groups,
            save=lambda state, owners: (*state.optimizer.param_groups,),
            temporary=lambda saved: saved,
        ),
        _watch_optimizer,
        Stored(_optimizer_state, _load_optimizer, _misfit_of_optimizer),
    ),
    Part(
        "optimizer attributes",
        lambda state: chain.from_iterable(
            nested(f"optimizer/{key}", form) for key, form in _optimizer_forms(state).items()
        ),
        stored=Stored(_optimizer_forms, _load_optimizer_forms),
    ),
    Part(
        "scheduler",
        lambda state: nested("scheduler", _scheduler_forms(state)),
        Guarded(save=lambda state, owners: state.scheduler, temporary=lambda saved: (saved,)),
        _watch_scheduler,
        Stored(_stored_scheduler, _load_scheduler_forms, _misfit_of_scheduler),
    ),
    Part("hooks", _hook_leaves, stored=Stored(_hook_forms, _load_hook_forms)),
    Part("contents of modules, hooks, optimizer and scheduler", lambda state: (), watched=_watch_extra_structure),
)
