"""Checks of the arguments of attach: one sentence with the value, what is accepted, and the remedy."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, isclass, signature
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from ..errors import UsageError, require, unknown
from ..hooks import StepSchedule, TrainingHook

LOSS_MODULES = "torch.nn.modules.loss"


Function = TypeVar("Function", bound=Callable[..., Any])
GUESSES = {
    "scheduler": ("step", "optimizer"),
    "scaler": ("get_scale", "unscale_"),
    "accelerator": ("gather", "prepare"),
}
"""Attributes by which an object is recognised as an argument."""


def with_checked_names(function: Function) -> Function:
    """Return a function that refuses unknown and surplus arguments with advice, in place of a ``TypeError``."""
    names = signature(function).parameters
    positional = [name for name, item in names.items() if item.kind is Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def checked(*given: Any, **named: Any) -> Any:
        if surplus := given[len(positional) :]:
            kinds = [name for name, parts in GUESSES.items() if all(hasattr(surplus[0], part) for part in parts)]
            raise UsageError(
                f"{function.__name__} was given {_shown(surplus[0])} after {' and '.join(positional)}; give all other "
                f"arguments by name: {kinds[0] if kinds else 'hooks'}=..."
            )
        for name in named:
            if name not in names:
                raise unknown(f"argument of {function.__name__}:", name, names)
        return function(*given, **named)

    return cast(Function, checked)


def check_hooks(hooks: Iterable[Any]) -> None:
    """Raise :class:`UsageError` for an item of ``hooks`` that is not the name, class or object of a hook."""
    for item in hooks:
        is_class = isclass(item) and issubclass(item, TrainingHook) and item is not TrainingHook
        require(
            isinstance(item, (str, TrainingHook)) or is_class,
            f"hooks contains {_shown(item)}; each item is the name of a hook, a subclass of TrainingHook or an object "
            "of one.",
        )


def check_tables(options: Any, schedules: Any) -> None:
    """Raise :class:`UsageError` if options or schedules are not given by the names of hooks."""
    kinds = {
        "hook_options": (options, Mapping, '{"norms": {"top": 4}}'),
        "schedules": (schedules, StepSchedule, '{"norms": StepSchedule(mode="stride", every_n_steps=10)}'),
    }
    for name, (table, kind, example) in kinds.items():
        is_table = isinstance(table, Mapping) and all(isinstance(hook, str) for hook in table)
        fits = is_table and all(isinstance(item, kind) for item in table.values())
        require(fits, f"{name} is {table!r}; it must be a dict by the names of hooks: {example}.")


def check_function(name: str, function: Callable[..., Any] | None, arguments: Sequence[str]) -> None:
    """Raise :class:`UsageError` if a function of the user cannot be called with these arguments."""
    if function is None:
        return
    call = f"{name}({', '.join(arguments)})"
    require(callable(function), f"{name} is {_shown(function)}; it must be a function: {call}.")
    is_criterion = isinstance(function, nn.Module) and type(function).__module__ == LOSS_MODULES
    kind = type(function).__name__
    require(
        not is_criterion,
        f"{name} is a {kind}, which takes outputs and targets; give a function of the model and the batch: "
        f"{name}=lambda model, batch: criterion(model(batch[0]), batch[1]).",
    )
    try:
        parameters = signature(function)
    except (TypeError, ValueError):  # a function that is not written in Python
        return
    try:
        parameters.bind(*arguments)
    except TypeError as error:
        raise UsageError(f"{call} cannot be called: {error}; give a function with these arguments.") from error


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise :class:`UsageError` if a scheduler is a class, has no ``step``, or schedules another optimizer."""
    is_other = isclass(scheduler) or isinstance(scheduler, Optimizer)
    fits = not is_other and all(callable(getattr(scheduler, name, None)) for name in ("step", "state_dict"))
    require(
        fits or scheduler is None,
        f"The scheduler is {_shown(scheduler)}; give the object of the loop, whose step() it calls, or leave "
        "scheduler= out.",
    )
    scheduled: Any = getattr(scheduler, "optimizer", None)
    groups = {id(group) for group in optimizer.param_groups}
    is_of_another = hasattr(scheduled, "param_groups") and groups.isdisjoint(map(id, scheduled.param_groups))
    require(
        not is_of_another,
        f"The {type(scheduler).__name__} schedules another optimizer than the one given to attach; give the "
        "scheduler of this optimizer, or leave scheduler= out.",
    )


def _shown(item: Any) -> str:
    """Return a value of a plain type, or the class of another object."""
    if item is None or isinstance(item, (bool, int, float, str)):
        return repr(item)
    return f"the class {item.__name__}" if isclass(item) else f"a {type(item).__name__}"
