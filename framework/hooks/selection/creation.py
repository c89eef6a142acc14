"""The creation of hooks with their options, and of sinks."""

import inspect
from collections.abc import Collection, Iterable, Mapping, MutableMapping, MutableSequence
from dataclasses import dataclass
from importlib import import_module
from numbers import Integral, Real
from typing import Any

from ...errors import UsageError, unknown, with_lines
from ...option_words import option_text
from ..base import TrainingHook
from ..class_checks import HookRegistry, check_hook_class, hook_options
from ..metrics import MetricSink
from ..registries import SinkRegistry

OptionsByHook = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ConfiguredHook:
    """A hook and the options that it was created with, including defaults."""

    hook: TrainingHook
    options: Mapping[str, Any]


def create_sinks(items: Iterable[str | MetricSink]) -> list[MetricSink]:
    """Return the sinks, with new ones for those given by name.

    A sink with an option, such as the project of ``wandb``, takes it from the variables of its service, or its default.

    Raises:
        UsageError: a name is unknown, or the package of a sink is missing.
    """
    sinks = []
    for item in items:
        if isinstance(item, str):
            import_module("loopscope.sinks")  # registers the shipped ones
            sink = SinkRegistry.get(item)
            sink.check_installed()
            sinks.append(sink())
        elif isinstance(item, MetricSink):
            sinks.append(item)
        else:
            raise UsageError(
                f"{item!r} is not a sink: give an object, such as CSVSink(), or a name: "
                f"{', '.join(SinkRegistry.names())}."
            )
    return sinks


def build_hooks(
    names: Iterable[str | type[TrainingHook]],
    user_options: OptionsByHook,
    strategy_options: OptionsByHook,
    existing: MutableSequence[ConfiguredHook],
    *,
    required: Collection[str] | None = None,
    left_out: MutableMapping[str, str] | None = None,
) -> list[ConfiguredHook]:
    """Create the hooks of one strategy, by name or class; the user's options override those of the strategy.

    Hooks in ``existing``, created for an earlier strategy with the same options, are reused; new ones are appended. If
    a hook that is not ``required`` (default: all are) cannot be created without options, ``left_out`` receives the
    reason.

    Raises:
        UsageError: a name or option is unknown, or a hook refuses a value.
    """
    configured = []
    for item in names:
        hook = HookRegistry.get(item) if isinstance(item, str) else item
        options = {**strategy_options.get(hook.name, {}), **user_options.get(hook.name, {})}
        try:
            check_hook_class(hook)
            configured.append(_configured_hook(hook, options, existing))
        except UsageError as error:
            if left_out is None or required is None or hook.name in required or options:
                raise
            left_out[hook.name] = str(error)
    return configured


def _check_type(hook: str, parameter: inspect.Parameter, value: Any) -> None:
    """Raise :class:`UsageError` for a value that is not of the number type or text that the option declares."""
    kinds: dict[Any, tuple[type, str]] = {
        int: (Integral, "an integer"),
        float: (Real, "a number"),
        bool: (bool, "True or False"),
        str: (str, "a text"),
    }
    kind, noun = kinds.get(parameter.annotation, (object, ""))
    is_mixed = isinstance(value, bool) and parameter.annotation in (int, float)
    if is_mixed or not isinstance(value, kind):
        raise UsageError(f"Hook {hook!r}: {parameter.name} is {value!r}; it must be {noun}.")


def _configured_hook(
    hook_class: type[TrainingHook], options: Mapping[str, Any], existing: MutableSequence[ConfiguredHook]
) -> ConfiguredHook:
    name, parameters = hook_class.name, hook_options(hook_class)
    for option in options:
        if option not in parameters:
            raise unknown(f"option of hook {name!r}:", option, parameters)
        _check_type(name, parameters[option], options[option])
    complete = {option: parameter.default for option, parameter in parameters.items()} | dict(options)
    for earlier in existing:
        if type(earlier.hook) is hook_class and earlier.options == complete:
            return earlier
    try:
        configured = ConfiguredHook(hook_class(**options), complete)
    except UsageError as error:
        raise UsageError(f"Hook {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        arguments = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise UsageError(f"Hook {name!r} cannot be created with ({arguments}): {with_lines(error)}.") from error
    existing.append(configured)
    return configured


def refuse_idle_options(user_options: OptionsByHook, active: Collection[str]) -> None:
    """Raise :class:`UsageError` for options of a hook that is inactive in all strategies."""
    for name in user_options:
        if name not in active:
            HookRegistry.get(name)
            raise UsageError(f"Hook {name!r} has options, but is not enabled; add {option_text('hooks', [name])}.")
