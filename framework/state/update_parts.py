"""The parts of a training state that hang on the optimizer and the scheduler, hooks, and the objects that all hold."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .attributes import HOOK_TABLES, NATIVE, is_hook_table, without_hooks
from .model_parts import GRADIENT_HOOKS, OwnHook, from_plain_forms, hook_tables, plain_forms
from .objects import ATOMS, attributes_of
from .parts import Guarded, Leaves, Part, StateObjects, Stored, Watched, nested
from .structure import Structure


def has_own_state(optimizer: Any) -> bool:
    """Return whether an optimizer is one of torch's kind; any other is a face before some, or without such a state."""
    return isinstance(optimizer, Optimizer)


def _optimizer_leaves(state: StateObjects) -> Leaves:
    if not has_own_state(state.optimizer):
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


def _own(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer that its ``state_dict`` leaves out; all of one before others.

    The groups of one that stands before others are often theirs, and ``load_state_dict`` would give it its own.
    """
    held = without_hooks(attributes_of(optimizer) or {})
    left_out = {key: value for key, value in held.items() if key not in ("state", "param_groups")}
    stands_alone = has_own_state(optimizer) and not Structure([left_out], apart={id(optimizer)}).of_kind(Optimizer)
    return left_out if stands_alone else held


def _state_of(optimizer: Any) -> dict[str, Any]:
    return optimizer.state_dict() if has_own_state(optimizer) else {}


def _watch_optimizer(state: StateObjects) -> Watched:
    optimizers = optimizers_of(state)

    def options() -> tuple[Any, ...]:
        found: list[Any] = []
        for optimizer in optimizers:
            found += [optimizer.state, optimizer.param_groups]
            for group in optimizer.param_groups:
                found += group.values()
                found += group["params"]
        return (*found,)

    tables = [table for optimizer in optimizers for table in (optimizer.state, *optimizer.state.values())]
    return Watched(
        [table for table in tables if isinstance(table, dict)],
        look=options,
        label="optimizer hyper-parameters or its groups",
    )


def optimizers_of(state: StateObjects) -> list[Optimizer]:
    """Return the optimizer, if it is of torch's kind, and those that hang on it."""
    behind = Structure([*_own(state.optimizer).values()], apart={*map(id, state.model.modules()), id(state.optimizer)})
    return [state.optimizer] * has_own_state(state.optimizer) + behind.of_kind(Optimizer)


def _optimizer_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(_own(state.optimizer))


def _load_optimizer_forms(state: StateObjects, stored: Mapping[str, Any]) -> None:
    space = attributes_of(state.optimizer) or {}
    from_plain_forms(state).fill(space, stored, [*_own(state.optimizer)])


def _scheduler_forms(state: StateObjects, _: Any = None) -> dict[str, Any]:
    return plain_forms(state).table(attributes_of(state.scheduler) or {})


def _load_scheduler_forms(state: StateObjects, stored: Mapping[str, Any]) -> None:
    space = attributes_of(state.scheduler) or {}
    from_plain_forms(state).fill(space, stored, [*space])


def _watch_scheduler(state: StateObjects) -> Watched:
    attributes = attributes_of(state.scheduler) or {}
    return Watched(look=lambda: (*attributes.values(),), label="the scheduler")


def _hooks(state: StateObjects) -> Iterator[tuple[str, list[Any]]]:
    """Yield the hooks by where they hang, without loopscope's own, which change nothing they do not declare."""
    optimizer = attributes_of(state.optimizer) or {}
    on_optimizer = ((f"optimizer/{key}", table) for key, table in optimizer.items() if is_hook_table(key, table))
    for name, table in chain(hook_tables(state), on_optimizer):
        yield name, [hook for hook in table.values() if not isinstance(hook, OwnHook)]


def _hook_leaves(state: StateObjects) -> Leaves:
    forms = plain_forms(state)
    for name, hooks in _hooks(state):
        yield from nested(name, [forms.of(hook) for hook in hooks])


def _hook_forms(state: StateObjects, _: Any = None) -> dict[str, list[Any]]:
    """Return the forms of the hooks that hold something; building the model makes the others again."""
    forms = plain_forms(state)
    found = {name: [forms.of(hook) for hook in hooks] for name, hooks in _hooks(state)}
    return {name: held for name, held in found.items() if any(form.keys() != {"code"} for form in held if form != {})}


def _load_hook_forms(state: StateObjects, stored: Mapping[str, list[Any]]) -> None:
    present, forms = dict(_hooks(state)), from_plain_forms(state)
    for name, held in stored.items():
        forms.items(held, present.get(name, []))


def hanging_on_modules(modules: list[nn.Module], beside: Iterable[Any] = (), apart: Iterable[Any] = ()) -> Structure:
    """Walk what all modules of a model, hooks on them and on parameters, and what is ``beside`` them hold."""
    tables = [module._parameters for module in modules if module._parameters]
    parameters = [parameter for table in tables for parameter in table.values() if parameter is not None]
    roots = [value for module in modules for value in beside_tables(module)]
    on_modules = filter(None, chain.from_iterable([map(vars(module).get, HOOK_TABLES) for module in modules]))
    on_parameters = filter(None, chain.from_iterable([map(read, parameters) for read in GRADIENT_HOOKS]))
    roots += [hook for table in chain(on_modules, on_parameters) for hook in table.values()]
    return Structure([*roots, *beside], apart={*map(id, modules), *map(id, parameters), *map(id, apart)})


def beside_tables(module: nn.Module) -> list[Any]:
    """Return what a module holds beside its tables of tensors, modules and hooks, and numbers."""
    return [value for key, value in vars(module).items() if key not in NATIVE and type(value) not in ATOMS]


def _hanging(state: StateObjects) -> Structure:
    """Walk what modules, hooks, optimizer and scheduler hold beside the tensors and tables that other parts name."""
    optimizer = state.optimizer
    beside: list[Any] = [attributes_of(optimizer) or {}]
    apart: list[Any] = [optimizer, state.scheduler]
    if has_own_state(optimizer):
        apart += [optimizer.state, optimizer.param_groups]  # which its own part watches
        remembered = [held for held in optimizer.state.values() if isinstance(held, dict)]
        beside += [value for held in remembered for value in held.values() if _is_object(value)]
    # a scheduler's lists of numbers are others after each step, and compared by value elsewhere
    beside += [value for value in (attributes_of(state.scheduler) or {}).values() if not _is_plain_list(value)]
    return hanging_on_modules([*state.model.modules()], beside, apart)


def _is_plain_list(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) in ATOMS or isinstance(item, Tensor) for item in value)


def _watch_hanging(state: StateObjects) -> Watched:
    found = _hanging(state)
    owned = {*map(id, state.streams.owned)}
    found.natives = [value for value in found.natives if id(value) not in owned]
    return Watched(
        attributes=found.containers(),
        look=found.read_natives if found.natives else None,
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
    now = _scheduler_forms(state)
    shared = [key for key, form in now.items() if isinstance(form, dict) and "again" in form]  # such as the optimizer
    if others := [key for key in now if key not in stored or (key in shared and stored[key] != now[key])]:
        return f"does not fit this run: its scheduler lacks {others[0]}"
    return numbers_missing("scheduler", now, stored)


def _misfit_of_fused(state: StateObjects, stored: Mapping[str, Any]) -> str:
    # torch's fused kernels do not compare the sizes of moments and parameters: they write past the end of smaller ones.
    if not stored:  # a face before other optimizers, whose states are attributes
        return ""
    parameters = [item for group in state.optimizer.param_groups for item in group["params"]]
    fused = [index for group in stored["param_groups"] if group.get("fused") for index in group["params"]]
    for index in fused:
        for name, value in stored["state"].get(index, {}).items():
            wanted = () if name == "step" else parameters[index].shape
            if not isinstance(value, Tensor) or value.shape != wanted:
                return f"does not fit this run: {name} of parameter {index} has not its shape, in the optimizer"
    return ""


UPDATE_PARTS = (
    Part(
        "optimizer",
        _optimizer_leaves,
        Guarded(
            lambda state: (state.optimizer, *[group["params"] for group in state.optimizer.param_groups]),
            apart=lambda state: state.optimizer.param_groups,
            keep=lambda state, owners: (*state.optimizer.param_groups,),
            passing=lambda kept: kept,
        ),
        _watch_optimizer,
        Stored(
            lambda state, streams: {} if "state" in _own(state.optimizer) else _state_of(state.optimizer),
            lambda state, stored: state.optimizer.load_state_dict(stored) if stored else None,
            _misfit_of_fused,
        ),
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
        Guarded(keep=lambda state, owners: state.scheduler, passing=lambda kept: (kept,)),
        _watch_scheduler,
        Stored(_scheduler_forms, _load_scheduler_forms, _misfit_of_scheduler),
    ),
    Part("hooks", _hook_leaves, stored=Stored(_hook_forms, _load_hook_forms)),
    Part("what modules, hooks, the optimizer or the scheduler hold", lambda state: (), watched=_watch_hanging),
)
