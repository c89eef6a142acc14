"""A misbehaving tap leaves the run unchanged, or the run ends with an error that names the hook and its tap."""

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.hooks import ForwardTap, GradientTap, HookPoint, TrainingHook

from tests.contracts.test_misbehaving_hooks import train_with
from tests.support import Case, Run, bare_run, differences
from tests.support.cases import slow_unless
from tests.support.misbehaving_hooks import DETECTED_BY_TRIPWIRE, HARMLESS, MUTATIONS, MisbehavingHook

CASE = Case()
TARGETS = {"parameter": "0.weight", "output": "0", "weight": "4", "input": "4", "forward": "4"}
"""The tapped object by kind of tap. The gradient of the first weight comes last, after all others."""
WITHOUT_EFFECT = {"drop_a_gradient"}
"""Mutations whose target does not exist when the first weight receives its gradient."""
UNDONE_BY_THE_ENGINE = {"enter_inference_mode", "leave_saved_tensor_hooks"}
"""Settings of autograd that a backward pass restores at its end: a tap is called in a separate pass."""
MUTATIONS_OF_GRADIENTS = {
    name for name in MUTATIONS if name.endswith("gradient") or "_gradient_" in name or "_gradients_" in name
}
"""Mutations whose target does not exist during a forward pass."""


class MisbehavingTap(MisbehavingHook, TrainingHook):
    """A hook whose taps make all mutations once, in the second step."""

    name = "misbehaving"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, mutations, kind="parameter", *, raises=False):
        super().__init__(mutations, raises=raises)
        self.kind = kind
        self.calls = 0

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return []

    def taps(self, model):
        target = TARGETS[self.kind]
        if self.kind == "forward":
            return [ForwardTap(target, self.on_gradient)]
        return [GradientTap(target, self.kind, self.on_gradient)]

    def on_gradient(self, gradient):
        if self.scene.state.loop.step == 2:
            self.calls += 1
            if self.calls == 1:
                self.act()


def assert_matches_bare_run(run: Run) -> None:
    """Fail unless the run has the bytes of the bare run, except for tables of hooks that contained taps."""
    digests, final = bare_run(CASE)
    assert len(run.digests) == len(digests)
    for expected, actual in zip(digests, run.digests, strict=True):
        differing_names = differences(expected, actual)
        assert [name for name in differing_names if not name.startswith(("gradient hooks/", "module hooks/"))] == []
    assert not differences(final, run.final)


def assert_caught(run: Run, kind: str) -> None:
    assert isinstance(run.error, StateMutationError), run.error
    assert f"Hook 'misbehaving' at tap on '{TARGETS[kind]}' of step 2 may only read, but changed the" in str(run.error)
    assert run.saved == []


def assert_no_effect_or_caught(mutator: MisbehavingTap, *, audit: bool) -> None:
    run = train_with(mutator, CASE, audit=audit, checkpoint_every=1, raises=StateMutationError)
    assert mutator.done
    if HARMLESS.issuperset(mutator.mutations):
        assert run.error is None
    if run.error is None:
        assert_matches_bare_run(run)
    else:
        assert_caught(run, mutator.kind)
    if mutator.kind == "parameter":
        assert (run.error is None) == (mutator.mutations[0] in HARMLESS | WITHOUT_EFFECT | UNDONE_BY_THE_ENGINE)


MUTATIONS_IN_ALL_TAPS = {
    "edit_the_learning_rate",
    "move_batchnorm_statistics",
    "evaluate_for_good",
    "leave_a_forward_hook",
}


def every_kind_of_tap(names: set[str], *, always: set[str]) -> pytest.MarkDecorator:
    """Parametrize over taps and mutations; quick: taps of a parameter, and mutations in ``always`` for all taps."""
    rows = [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=slow_unless(kind == "parameter" or name in always))
        for kind in TARGETS
        for name in sorted(names - (MUTATIONS_OF_GRADIENTS if kind in ("input", "forward") else set()))
    ]
    return pytest.mark.parametrize(("kind", "name"), rows)


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@every_kind_of_tap(MUTATIONS.keys() - DETECTED_BY_TRIPWIRE, always=set())
def test_misbehaving_tap_is_harmless_or_caught_by_audit(kind, name):
    """A mutation in a tap either has no effect on the run or raises under audit."""
    assert_no_effect_or_caught(MisbehavingTap([name], kind), audit=True)


@pytest.mark.guarantee("observers-change-nothing")
@every_kind_of_tap(DETECTED_BY_TRIPWIRE | HARMLESS, always=MUTATIONS_IN_ALL_TAPS)
def test_misbehaving_tap_is_harmless_or_caught_immediately(kind, name):
    """A mutation in a tap either has no effect on the run or raises without an audit."""
    assert_no_effect_or_caught(MisbehavingTap([name], kind), audit=False)


REVERSIBLE = [
    *("evaluate_for_good", "freeze_the_model", "change_dropout", "replace_a_gradient", "leave_a_forward_hook"),
    *("change_the_default_dtype", "require_determinism", "change_the_number_of_threads"),
    *("leave_a_forward_pre_hook", *sorted(HARMLESS)),
]


@pytest.mark.longer
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("name", REVERSIBLE)
def test_mutations_of_a_raising_tap_are_undone(name):
    """With on_error="skip", the run has the bytes of the run without the hook."""
    run = train_with(MisbehavingTap([name], raises=True), CASE, on_error="skip")
    assert_matches_bare_run(run)
    assert [error["error"] for error in run.manager.hooks.failures.errors] == ["DeliberateError: after the mutations"]


IRREVERSIBLE = ["edit_the_learning_rate", "write_in_place", "move_batchnorm_statistics", "lower_all_precisions"]


@pytest.mark.parametrize("name", IRREVERSIBLE)
def test_irreversible_mutations_of_raising_tap_are_reported(name):
    """StateMutationError names the parameter if the mutation cannot be undone."""
    run = train_with(MisbehavingTap([name], raises=True), CASE, audit=False, on_error="skip", raises=StateMutationError)
    assert_caught(run, "parameter")


def test_tap_computing_gradients_does_not_trigger_itself():
    """A tap that runs its own backward pass is called once, and the run is unchanged."""
    mutator = MisbehavingTap([], "output")
    mutator.act = lambda: grads_by_hand(mutator.scene)
    assert_matches_bare_run(train_with(mutator, CASE, audit=False))
    assert mutator.calls == 1


def grads_by_hand(scene) -> None:
    with torch.enable_grad():
        output = scene.model[0](torch.ones(2, 4))
        torch.autograd.grad(output.sum(), [*scene.model[0].parameters(), output])


class Rewriting(MisbehavingTap):
    """A hook that rewrites equal bytes to a weight at every call of either of its taps."""

    def taps(self, model):
        return [GradientTap(target, "parameter", self.on_gradient) for target in ("0.weight", "4.weight")]

    @torch.no_grad()
    def on_gradient(self, gradient):
        self.calls += 1
        self.scene.parameter.mul_(1)


@pytest.mark.longer
def test_tap_rewriting_equal_bytes_raises_no_alarm():
    """A tap writes the bytes of a weight back at each of 18 calls, and the run is unchanged."""
    mutator = Rewriting([])
    run = train_with(mutator, CASE, audit=False, steps=9)
    assert mutator.calls == 18
    assert differences(bare_run(CASE, steps=9)[1], run.final) == []
