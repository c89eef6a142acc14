"""Undeclared commits are found in a hook's methods before anything runs."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from loopscope import training_hooks
from loopscope.hooks import (
    HookPoint,
    HookRegistry,
    InterventionHook,
    ModelDataContext,
    StatePart,
    UndeclaredCommitError,
)
from loopscope.hooks.commit_check import VERBS, refuse_undeclared_commits

assert training_hooks.__all__


class Base(InterventionHook):
    """An intervention that commits nothing."""

    name = "base"
    hook_points = {HookPoint.POST_BACKWARD}

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        return {}

    def describe_metrics(self) -> list[Any]:
        return []


def with_method(method: Callable[..., Any], **members: Any) -> type[InterventionHook]:
    return type("Made", (Base,), {"method": method, **members})


def test_the_verbs_are_those_that_record_a_commit_in_the_sapi() -> None:
    recording = {
        name: next(part for part in StatePart if f"StatePart.{part.name}" in inspect.getsource(method))
        for name, method in inspect.getmembers(ModelDataContext, inspect.isfunction)
        if "_commits.record" in inspect.getsource(method)
    }
    assert recording == VERBS


CALLS = {
    "scale_gradients": lambda self, ctx: ctx.scale_gradients(0.5),
    "clamp_gradients": lambda self, ctx: ctx.clamp_gradients(0.5),
    "clip_gradients": lambda self, ctx: ctx.clip_gradients(0.5),
    "replace_gradients": lambda self, ctx: [ctx.replace_gradients({}) for _ in range(2)],
    "add_to_gradients": lambda self, ctx: ctx.add_to_gradients({}, None),
    "blend_parameters": lambda self, ctx: (lambda: ctx.blend_parameters({}, 0.5))(),
    "thaw_parameters": lambda self, ctx: ctx.thaw_parameters([]),
    "reset_optimizer_state": lambda self, ctx: ctx.reset_optimizer_state([]),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_method_that_calls_an_undeclared_verb_is_found_also_in_nested_functions(verb: str) -> None:
    part, call = VERBS[verb], CALLS[verb]
    for method in (call, staticmethod(call), classmethod(call)):
        with pytest.raises(UndeclaredCommitError, match=f"'base' calls {verb}.*commits = {{StatePart.{part.name}}}"):
            refuse_undeclared_commits(with_method(method))
        refuse_undeclared_commits(with_method(method, commits={part}))


def test_an_inherited_method_counts_and_an_overridden_one_does_not() -> None:
    parent = with_method(CALLS["scale_gradients"])
    with pytest.raises(UndeclaredCommitError):
        refuse_undeclared_commits(type("Child", (parent,), {}))
    refuse_undeclared_commits(type("Child", (parent,), {"method": lambda self: None}))


def test_a_function_or_a_method_of_its_own_under_such_a_name_is_no_commit() -> None:
    def scale_gradients() -> None:
        pass

    refuse_undeclared_commits(with_method(lambda self: scale_gradients()))
    refuse_undeclared_commits(with_method(lambda self: self.scale_gradients(), scale_gradients=lambda self: None))


def test_every_shipped_hook_declares_what_it_commits() -> None:
    for hook in HookRegistry:
        refuse_undeclared_commits(hook)
