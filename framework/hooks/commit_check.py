"""Finds undeclared commits before a run: reads which commit verbs of the SAPI the methods of a hook call."""

import dis
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from .base import InterventionHook, TrainingHook
from .commits import StatePart, UndeclaredCommitError

VERBS: Mapping[str, StatePart] = {
    "scale_gradients": StatePart.GRADIENTS,
    "clamp_gradients": StatePart.GRADIENTS,
    "clip_gradients": StatePart.GRADIENTS,
    "replace_gradients": StatePart.GRADIENTS,
    "add_to_gradients": StatePart.GRADIENTS,
    "blend_parameters": StatePart.PARAMETERS,
    "thaw_parameters": StatePart.PARAMETERS,
    "reset_optimizer_state": StatePart.OPTIMIZER,
}


def refuse_undeclared_commits(hook: type[TrainingHook]) -> None:
    """Raise :class:`UndeclaredCommitError` if a method calls a commit verb that the class does not declare.

    Only calls as attributes are seen (``model_ctx.scale_gradients``), of any object but those methods that the hook
    itself has under such a name. What hides from this is refused when it is called.
    """
    if not issubclass(hook, InterventionHook):
        return
    for verb, part in VERBS.items():
        if part not in hook.commits and verb not in dir(hook) and verb in set(_attributes(hook)):
            raise UndeclaredCommitError(
                f"Hook {hook.name!r} calls {verb}, which changes the {part.value}, but does not declare it; "
                f"add commits = {{StatePart.{part.name}}} to its class."
            )


def _attributes(hook: type[Any]) -> Iterator[str]:
    """Yield the names of all attributes that the methods of a class read."""
    for name in dir(hook):
        member = inspect.getattr_static(hook, name)
        function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
        if isinstance(function, FunctionType):
            yield from _attributes_in(function.__code__)


def _attributes_in(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _attributes_in(constant)
