"""From hook names and options to hook objects, refusing what a hook would not take."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from framework.errors import UsageError, unknown
from framework.hooks import TrainingHook
from framework.registry import HookRegistry, hook_options

OptionsByHook = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ConfiguredHook:
    """A hook with the options it was made with, defaults included."""

    hook: TrainingHook
    options: Mapping[str, Any]


def build_hooks(names: Iterable[str], given: OptionsByHook, of_the_strategy: OptionsByHook) -> list[ConfiguredHook]:
    """Make the hooks; the user's options win over those of the strategy.

    Raises :class:`UsageError` for options of a hook that is not on, of an unknown name, or out of range.
    """
    active = list(names)
    for name in given:
        if name not in active:
            HookRegistry.get(name)
            raise UsageError(f"Options are given for hook {name!r}, which is not on; add --hooks {name}.")
    return [_configured(name, {**of_the_strategy.get(name, {}), **given.get(name, {})}) for name in active]


def _configured(name: str, options: Mapping[str, Any]) -> ConfiguredHook:
    hook_class = HookRegistry.get(name)
    known = hook_options(hook_class)
    for option in options:
        if option not in known:
            raise unknown(f"option of hook {name!r}", option, known)
    try:
        hook = hook_class(**options)
    except UsageError as error:
        raise UsageError(f"Hook {name!r}: {error}") from error
    defaults = {option: parameter.default for option, parameter in known.items()}
    return ConfiguredHook(hook, {**defaults, **options})
