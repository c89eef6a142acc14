"""Advice in error messages about hooks, derived from the error, the hook's context and its class."""

import re
from collections.abc import Callable, Iterator, Mapping
from traceback import extract_tb, walk_tb
from typing import Any

from ..errors import StateMutationError, nearest, source_location
from ..hooks import SET_AT, BackwardContext, HookPoint, InterventionHook, RunDataContext, RunInfo, TrainingHook
from .model_context import ModelContext

CONTEXTS = (RunDataContext, ModelContext, BackwardContext, RunInfo)
NO_GRADIENTS = "Hooks run without gradients: call ctx.compute_batch_gradients(batch), or enter torch.enable_grad()."
# Alternatives without side effects, by words of the tripwire's message that identify the changed state.
ALTERNATIVES = {
    "gradient": "ctx.compute_batch_gradients(batch) and torch.autograd.grad do not change gradients; to change them, "
    "declare commits = {StatePart.GRADIENTS} and call model_ctx.scale_gradients or model_ctx.replace_gradients.",
    "parameter": "ctx.evaluate(weights) evaluates other weights, model_ctx.take_step and model_ctx.apply_perturbation "
    "in intervene change them until the rollback; for a lasting change, declare commits = {StatePart.PARAMETERS} and "
    "call model_ctx.blend_parameters.",
    ".training": "ctx.forward(inputs, train=True or False) runs the model in another mode.",
}

NEEDS = {
    "needs_experiment_loop": "trains additional epochs",
    "needs_loss": "computes losses",
    "needs_loader": "reads the training data itself",
    "needs_next_batch": "needs the complete batch of a step before its first pass",
}
"""Descriptions of requirements that a custom training loop may not fulfil; messages name the first missing one."""


def called_method(hook: TrainingHook, where: str) -> Callable[..., Any]:
    """Return the method of a hook that is called at ``where``, the name of a hook point or of a method."""
    if (point := HookPoint.__members__.get(where)) is not None:
        intervenes = isinstance(hook, InterventionHook) and hook.intervenes_at(point)
        where = "intervene" if intervenes else "compute"
    method: Callable[..., Any] = getattr(type(hook), "taps" if where.startswith("tap on") else where)
    return method


def advice_on_mutation(hook: TrainingHook, where: str, error: StateMutationError) -> str:
    """Return the source location of a hook that changed the state, and an alternative without side effects."""
    changed = str(error).partition(" state: ")[2].partition(". ")[0]
    alternatives = [sentence for word, sentence in ALTERNATIVES.items() if word in changed]
    location = source_location(called_method(hook, where))
    return " ".join(filter(None, [location and f"Its code is at {location}.", *alternatives[:1]]))


def advice_on_error(hook: TrainingHook, error: BaseException) -> str:
    """Return advice about an error of a hook, or an empty text if the error suffices."""
    if isinstance(error, AttributeError) and isinstance(error.obj, CONTEXTS):
        return nearest(str(error.name), [name for name in dir(error.obj) if not name.startswith("_")]).strip()
    if isinstance(error, RuntimeError) and "does not require grad" in str(error):
        return NO_GRADIENTS
    if isinstance(error, KeyError) or "NoneType" in str(error):
        return " ".join(dict.fromkeys(_advice_on_unset_fields(hook, error)))
    return ""


def _advice_on_unset_fields(hook: TrainingHook, error: BaseException) -> Iterator[str]:
    """Yield a sentence for every unset field of its context that a failed line of a hook names."""
    # CPython's AttributeError and KeyError do not state from which object a None or a key came.
    for (frame, _), entry in zip(walk_tb(error.__traceback__), extract_tb(error.__traceback__), strict=True):
        for context in [value for value in frame.f_locals.values() if type(value) is RunDataContext]:
            for name in re.findall(r"\.(\w+)", entry.line or ""):
                if name in SET_AT and (
                    getattr(context, name) is None or (name == "evaluation" and not context.evaluation)
                ):
                    yield _reason_unset(hook, name, context.hook_point)


def _reason_unset(hook: TrainingHook, name: str, point: HookPoint) -> str:
    points, flag, condition = SET_AT[name]
    if point not in points:
        return f"{name} is not set at {point.name}; it is set at {', '.join(point.name for point in points)}."
    if flag and not getattr(hook, flag):
        return f"{name} is not set; set {flag} = True in class {type(hook).__name__}."
    return f"{name} is not set here; it is set {condition}."


def unmet_need(hook: TrainingHook | type[TrainingHook], lacks: Mapping[str, str]) -> str:
    """Return a requirement of a hook that the loop does not fulfil, with advice, or an empty text."""
    missing = [need for need in lacks if getattr(hook, need)]
    return f"Hook {hook.name!r} {NEEDS[missing[0]]}; {lacks[missing[0]]}." if missing else ""
