"""The parts of a training state that hang on the optimizer and the scheduler, hooks, and the objects that all hold."""

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
"""The option of a group of an optimizer that says which group it was part of, before ranks split it."""
BY_GROUP = frozenset({"base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums"})
"""Attributes of torch's schedulers that are lists with one item for each group."""


def is_torch_optimizer(optimizer: Any) -> bool:
    """Return whether an optimizer is one of torch's kind; any other is a face before some, or without such a state."""
    return isinstance(optimizer, Optimizer)


def _optimizer_leaves(state: StateObjects) -> Leaves:
    if not is_torch_optimizer(state.optimizer):
        return
    names: dict[Tensor, str] = {parameter: name for name, parameter in state.model.named_parameters()}
    forms = plain_forms(state)
    for parameter, held in state.optimizer.state.items():
        yield from nested(f"optimizer/{names.get(parameter, 'unknown')}", _with_forms_of_objects(held, forms))
    for index, group in enumerate(state.optimizer.param_groups):
        yield f"optimizer/group {index}/params", [names.get(item, "unknown") for item in group["params"]]
        for key, option in group.items():
            if key != "params":
                yield from nested(f"optimizer/group {index}/{key}", option)


def _with_forms_of_objects(held: Any, forms: Any) -> Any:
    """Return what an optimizer remembers of a parameter, with plain forms for objects."""
    if not isinstance(held, Mapping):
        return held
    return {key: forms.of(value) if _is_object(value) else value for key, value in held.items()}


def _is_object(value: Any) -> bool:
    return type(value) not in ATOMS and not isinstance(value, Tensor)


def _optimizer_attributes(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``state_dict`` leaves out; all of one before others.

    The groups of one that stands before others are often theirs, and ``load_state_dict`` would give it its own.
    """
    held = without_hooks(attributes_of(optimizer) or {})
    left_out = {key: value for key, value in held.items() if key not in ("state", "param_groups")}
    stands_alone = is_torch_optimizer(optimizer) and not Structure([left_out], excluded={id(optimizer)}).of_kind(
        Optimizer
    )
    return left_out if stands_alone else held


def _names_of(state: StateObjects) -> list[str]:
    """Return the names of the optimizer's parameters, in the order in which its state dict counts them."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    held = [item for group in state.optimizer.param_groups for item in group["params"]]
    return [names.get(id(item), f"of the optimizer alone {index}") for index, item in enumerate(held)]


def _origins(optimizer: Any) -> list[int]:
    """Return for each group of an optimizer which one it was before ranks split it."""
    groups = optimizer.param_groups if is_torch_optimizer(optimizer) else []
    return [group.get(SPLIT_FROM, index) for index, group in enumerate(groups)]


def _optimizer_state(state: StateObjects, _: Any = None) -> dict[str, Any]:
    """Return an optimizer's state dict by the names of parameters, its groups as before ranks split them."""
    optimizer = state.optimizer
    if not is_torch_optimizer(optimizer) or "state" in _optimizer_attributes(optimizer):
        return {}
    held, names, groups = optimizer.state_dict(), dict(enumerate(_names_of(state))), dict[int, dict[str, Any]]()
    for origin, group in zip(_origins(optimizer), held["param_groups"], strict=True):
        known = groups.setdefault(origin, {**group, "params": []})
        known.pop(SPLIT_FROM, None)
        known["params"] += [names[index] for index in group["params"]]
    by_name = {names.get(index, index): value for index, value in held["state"].items()}
    return {**held, "state": by_name, "param_groups": [*groups.values()]}


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
    if not stored:  # a face before other optimizers, whose states are attributes
        return ""
    have = [sorted(group["params"]) for group in _optimizer_state(state)["param_groups"]]
    if have != [sorted(group["params"]) for group in stored["param_groups"]]:
        return "was written for another optimizer: its groups hold other parameters"
    return _misfit_of_fused(state, stored)


def _regroup(form: Any, count: int, places: Sequence[int]) -> Any:
    """Return the plain form of a scheduler with other items of its lists by group, of which there are ``count``."""
    if isinstance(form, list):
        return [_regroup(item, count, places) for item in form]
    if not isinstance(form, Mapping):
        return form
    found = {key: _regroup(item, count, places) for key, item in form.items()}
    for key in BY_GROUP & found.keys():
        if isinstance(form[key], Mapping) and len(items := form[key].get("list", ())) == count:
            found[key] = {"list": [items[place] for place in places]}
    return found


def _watch_optimizer(state: StateObjects) -> Watched:
    optimizers = optimizers_of(state)

    def options() -> list[Any]:
        found: list[Any] = []
        for optimizer in optimizers:
            found += [optimizer.state, optimizer.param_groups]
            for group in optimizer.param_groups:
                found += with_types(group.values())
                found += group["params"]
        return found

    tables = [table for optimizer in optimizers for table in (optimizer.state, *optimizer.state.values())]
    return Watched(
        [table for table in tables if isinstance(table, dict)],
        read_values=options,
        label="optimizer hyper-parameters or its groups",
    )


def optimizers_of(state: StateObjects) -> list[Optimizer]:
    """Return the optimizer, if it is of torch's kind, and those that hang on it."""
    behind = Structure(
        [*_optimizer_attributes(state.optimizer).values()],
        excluded={*map(id, state.model.modules()), id(state.optimizer)},
    )
    return [state.optimizer] * is_torch_optimizer(state.optimizer) + behind.of_kind(Optimizer)


def _optimizer_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(_optimizer_attributes(state.optimizer))


def _load_optimizer_forms(state: StateObjects, stored: Mapping[str, Any]) -> None:
    space = attributes_of(state.optimizer) or {}
    from_plain_forms(state).fill(space, stored, [*_optimizer_attributes(state.optimizer)])


def _scheduler_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(attributes_of(state.scheduler) or {})


def _stored_scheduler(state: StateObjects, _: Any = None) -> dict[str, Any]:
    """Return the forms with one item for each group in the lists by group, however ranks have split groups."""
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
    """Yield the hooks, where there are any, but for loopscope's own, which change nothing they do not declare.

    Nor those of torch's ways to train on several processes, which say how parameters lie there.
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
    """Return the plain forms of the hooks by where they hang."""
    if not (present := [*_hooks(state)]):
        return {}  # as nearly always
    forms = plain_forms(state)
    return {name: [forms.of(hook) for hook in hooks] for name, hooks in present}


def _hook_forms(state: StateObjects, _: Any = None) -> dict[str, list[Any]]:
    """Return the forms of the hooks that hold something; building the model makes the others again."""
    return {name: held for name, held in _forms_of_hooks(state).items() if any(map(_holds_something, held))}


def _holds_something(form: Any) -> bool:
    """Return whether the plain form of a hook is more than code, or one of the flags that torch keeps beside hooks."""
    return isinstance(form, Mapping) and form.keys() not in ({"code"}, set())


def _load_hook_forms(state: StateObjects, stored: Mapping[str, list[Any]]) -> None:
    present, forms = dict(_hooks(state)), from_plain_forms(state)
    for name, held in stored.items():
        forms.items(held, present.get(name, []))


def reachable_from_modules(
    modules: list[nn.Module], beside: Iterable[Any] = (), excluded: Iterable[Any] = ()
) -> Structure:
    """Walk what all modules of a model, hooks on them and on parameters, and what is ``beside`` them hold."""
    tables = [module._parameters for module in modules if module._parameters]
    parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
    roots = [value for module in modules for value in extra_attributes(module)]
    on_modules = filter(None, chain.from_iterable([map(vars(module).get, HOOK_TABLES) for module in modules]))
    on_parameters = filter(None, chain.from_iterable([map(read, parameters) for read in GRADIENT_HOOKS]))
    roots += [hook for table in chain(on_modules, on_parameters) for hook in table.values()]
    return Structure([*roots, *beside], excluded={*map(id, modules), *map(id, parameters), *map(id, excluded)})


def extra_attributes(module: nn.Module) -> list[Any]:
    """Return what a module holds beside its tables of tensors, modules and hooks, and numbers."""
    return [value for key, value in vars(module).items() if key not in NATIVE and type(value) not in ATOMS]


def _extra_structure(state: StateObjects) -> Structure:
    """Walk what modules, hooks, optimizer and scheduler hold beside the tensors and tables that other parts name."""
    optimizer = state.optimizer
    beside: list[Any] = [attributes_of(optimizer) or {}]
    excluded: list[Any] = [optimizer, state.scheduler]
    if is_torch_optimizer(optimizer):
        excluded += [optimizer.state, optimizer.param_groups]  # which its own part watches
        remembered = [held for held in optimizer.state.values() if isinstance(held, dict)]
        beside += [value for held in remembered for value in held.values() if _is_object(value)]
        beside += [held for held in optimizer.state.values() if not isinstance(held, dict)]
    # a scheduler's lists of numbers are others after each step, and compared by value elsewhere
    beside += [value for value in (attributes_of(state.scheduler) or {}).values() if not _is_plain_list(value)]
    return reachable_from_modules([*state.model.modules()], beside, excluded)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in ATOMS or isinstance(item, Tensor) for item in value)


def _watch_extra_structure(state: StateObjects) -> Watched:
    found = _extra_structure(state)
    owned = {*map(id, state.streams.owned)}
    found.natives = [value for value in found.natives if id(value) not in owned]
    return Watched(
        containers=found.containers(),
        read_values=found.read_natives if found.natives else None,
        label="an array or a generator that a module, the optimizer or the scheduler holds",
    )


def numbers_missing(name: str, now: Mapping[str, Any], stored: Mapping[str, Any]) -> str:
    """Say which number among the named values of ``now`` is stored as something else; empty if none is."""
    numbers = [key for key, value in now.items() if isinstance(value, (int, float))]
    others = [key for key in numbers if not _is_number(stored.get(key))]
    return f"does not fit this run: {others[0]} of the {name} is no number" if others else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)


def _misfit_of_scheduler(state: StateObjects, stored: Mapping[str, Any]) -> str:
    now = _stored_scheduler(state)
    shared = [key for key, form in now.items() if isinstance(form, dict) and "again" in form]  # such as the optimizer
    if others := [key for key in now if key not in stored or (key in shared and stored[key] != now[key])]:
        return f"does not fit this run: its scheduler lacks {others[0]}"
    return numbers_missing("scheduler", now, stored)


def _misfit_of_fused(state: StateObjects, stored: Mapping[str, Any]) -> str:
    # torch's fused kernels do not compare the sizes of moments and parameters: they write past the end of smaller ones.
    held = [item for group in state.optimizer.param_groups for item in group["params"]]
    parameters = dict(zip(_names_of(state), held, strict=True))
    fused = [known for group in stored["param_groups"] if group.get("fused") for known in group["params"]]
    for known in fused:
        for name, value in stored["state"].get(known, {}).items():
            wanted = () if name == "step" else parameters[known].shape
            if not isinstance(value, Tensor) or value.shape != wanted:
                return f"does not fit this run: {name} of {known} has not its shape, in the optimizer"
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
    Part("what modules, hooks, the optimizer or the scheduler hold", lambda state: (), watched=_watch_extra_structure),
)
