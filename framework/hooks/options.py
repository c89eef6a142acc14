"""From hook names and options to hook objects, refusing what a hook would not take."""

from collections.abc import Collection, Iterable, Mapping, MutableSequence
from dataclasses import dataclass
from typing import Any

from ..errors import UsageError, unknown
from .base import TrainingHook
from .selection import HookRegistry, hook_options

OptionsByHook = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class ConfiguredHook:
    """A hook with the options it was made with, defaults included."""

    hook: TrainingHook
    options: Mapping[str, Any]


def build_hooks(
    names: Iterable[str], given: OptionsByHook, of_the_strategy: OptionsByHook, made: MutableSequence[ConfiguredHook]
) -> list[ConfiguredHook]:
    """Make the hooks of one strategy; the user's options win over those of the strategy.

    A hook that was ``made`` for an earlier strategy with the same options serves again; new ones are added there.
    Raises :class:`UsageError` for an unknown name or option, and for a value that the hook refuses.
    """
    return [_configured(name, {**of_the_strategy.get(name, {}), **given.get(name, {})}, made) for name in names]


def refuse_idle_options(given: OptionsByHook, active: Collection[str]) -> None:
    """Raise :class:`UsageError` for options of a hook that is on in none of the strategies."""
    for name in given:
        if name not in active:
            HookRegistry.get(name)
            raise UsageError(f"Options are given for hook {name!r}, which is not on; add --hooks {name}.")


def _configured(name: str, options: Mapping[str, Any], made: MutableSequence[ConfiguredHook]) -> ConfiguredHook:
    hook_class = HookRegistry.get(name)
    known = hook_options(hook_class)
    for option in options:
        if option not in known:
            raise unknown(f"option of hook {name!r}:", option, known)
    complete = {option: parameter.default for option, parameter in known.items()} | dict(options)
    for earlier in made:
        if type(earlier.hook) is hook_class and earlier.options == complete:
            return earlier
    try:
        configured = ConfiguredHook(hook_class(**options), complete)
    except UsageError as error:
        raise UsageError(f"Hook {name!r}: {error}") from error
    made.append(configured)
    return configured
