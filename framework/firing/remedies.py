"""What to do about an error of a hook, as far as the error, the view that it had, and its class tell, or a need."""

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import FrozenInstanceError
from traceback import walk_tb
from types import CodeType
from typing import Any

from ..errors import StateMutationError, nearest, place_of, text_of
from ..hooks import SET_AT, HookPoint, InterventionHook, ModelDataContext, RunDataContext, RunInfo, TrainingHook

NO_GRADIENTS = "Hooks run without gradients: call ctx.compute_batch_gradients(batch), or enter torch.enable_grad()."
# What an observer changed, by words of the tripwire's sentence, with what does the same without a trace.
INSTEAD = {
    "gradient": "ctx.compute_batch_gradients(batch) and torch.autograd.grad write to none; to change them, declare "
    "commits = {StatePart.GRADIENTS} and call model_ctx.scale_gradients or model_ctx.replace_gradients.",
    "optimizer": "ctx.optimizer_groups tells its options, and model_ctx.take_step in intervene what a step does.",
    "parameter": "ctx.evaluate(weights) evaluates others, model_ctx.take_step and model_ctx.apply_perturbation in "
    "intervene try them; to change the run's, declare commits = {StatePart.PARAMETERS} and call "
    "model_ctx.blend_parameters.",
    ".training": "ctx.forward(inputs, train=True or False) runs the model in another mode.",
}

NEEDS = {
    "needs_own_loop": "trains epochs of its own",
    "needs_loss": "computes losses of its own",
    "needs_loader": "reads the training data by itself",
    "needs_evaluation": "evaluates the model by itself",
    "needs_next_batch": "needs the whole batch of a step before its first pass",
}
"""What hooks may declare that a loop may lack, in words; the first that is missing is told."""


def function_at(hook: TrainingHook, where: str) -> Callable[..., Any]:
    """Return the method of a hook that was called at a hook point, or under the name ``where``."""
    if (point := HookPoint.__members__.get(where)) is not None:
        acts = isinstance(hook, InterventionHook) and hook.intervenes_at(point)
        where = "intervene" if acts else "compute"
    found: Callable[..., Any] = getattr(type(hook), "taps" if where.startswith("tap on") else where)
    return found


def instead_of(hook: TrainingHook, where: str, error: StateMutationError) -> str:
    """Say where a hook that changed the state is written, and what to call instead of what changed it."""
    changed = str(error).partition(" state: ")[2].partition(". ")[0]
    found = [remedy for word, remedy in INSTEAD.items() if word in changed]
    place = place_of(function_at(hook, where))
    return " ".join(filter(None, [place and f"It is written at {place}.", *found[:1]]))


def remedy(hook: TrainingHook, where: str, error: BaseException) -> str:
    """Say in a sentence what to do about an error of a hook; empty where nothing better than the error is known."""
    if isinstance(error, SystemExit):
        return "A hook cannot end the run by sys.exit(); one that must, raises an error."
    if isinstance(error, FrozenInstanceError):
        return "What hooks are told is frozen; a hook returns its metrics, and commits what it is to change."
    if isinstance(error, AttributeError) and isinstance(error.obj, (RunDataContext, ModelDataContext, RunInfo)):
        return nearest(str(error.name), [name for name in dir(error.obj) if not name.startswith("_")]).strip()
    if isinstance(error, RuntimeError) and "does not require grad" in text_of(error):
        return NO_GRADIENTS
    if isinstance(error, KeyError) or "NoneType" in text_of(error):
        return " ".join(_unset(hook, where, error))
    return ""


def _unset(hook: TrainingHook, where: str, error: BaseException) -> Iterator[str]:
    """Yield a sentence for every field of its view that a hook had read, and that was not set then."""
    view: RunDataContext | None = None
    read: list[str] = []
    for frame, _ in walk_tb(error.__traceback__):
        held = [value for value in frame.f_locals.values() if type(value) is RunDataContext]
        view = held[0] if held else view
        if held and not str(frame.f_globals.get("__name__")).startswith("loopscope.firing"):
            read += _attributes(frame.f_code, frame.f_lasti)
    if view is None:
        return
    written = inspect.unwrap(function_at(hook, where))
    if not read and inspect.isfunction(written):  # it had returned
        read = _attributes(written.__code__)
    for name in dict.fromkeys(name for name in read if name in SET_AT):
        value = getattr(view, name)
        if value is None or (name == "evaluation" and not value):
            yield _why(hook, name, view.hook_point)


def _attributes(code: CodeType, until: int | None = None) -> list[str]:
    """Return the names of the attributes that code reads, up to an instruction."""
    steps = [step for step in dis.get_instructions(code) if until is None or step.offset <= until]
    return [str(step.argval) for step in steps if step.opname in ("LOAD_ATTR", "LOAD_METHOD")]


def _why(hook: TrainingHook, name: str, point: HookPoint) -> str:
    points, need, condition = SET_AT[name]
    if point not in points:
        return f"{name} is not set at {point.name}; it is at {', '.join(each.name for each in points)}."
    if need and not getattr(hook, need):
        return f"{name} is not set: set {need} = True in class {type(hook).__name__}."
    return f"{name} is not set here; it is {condition}."


def unmet(hook: TrainingHook | type[TrainingHook], lacks: Mapping[str, str]) -> str:
    """Say what a hook needs that a loop lacks, and what to do; empty if nothing is missing."""
    missing = [need for need in lacks if getattr(hook, need)]
    return f"Hook {hook.name!r} {NEEDS[missing[0]]}; {lacks[missing[0]]}." if missing else ""
