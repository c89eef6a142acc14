"""Whatever a tap does amid a pass of the run, the run is that without it, or it ends and says whose tap did what."""

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.hooks import GradientTap, HookPoint, TrainingHook

from tests.contracts.test_vandals import train_with
from tests.support import Case, Run, bare_run, differences
from tests.support.cases import slow_unless
from tests.support.vandals import DEEDS, HARMLESS, SEEN, Vandal

CASE = Case()
TARGETS = {"parameter": "0.weight", "output": "0", "weight": "4", "input": "4"}
"""What is tapped, by the kind of tap: the gradient of the first weight comes last, when all others are there."""
NOTHING_TO_DO = {"drop_a_gradient"}
"""Deeds on what is not there when the first weight gets its gradient."""
ON_GRADIENTS = {name for name in DEEDS if name.endswith("gradient") or "_gradient_" in name or "_gradients_" in name}
"""Deeds on what is not there amid a forward pass."""


class TappingVandal(Vandal, TrainingHook):
    """A vandal in whose taps all is done, once, in the second step."""

    name = "vandal"
    hook_points = frozenset({HookPoint.POST_STEP})

    def __init__(self, deeds, kind="parameter", *, raises=False):
        super().__init__(deeds, raises=raises)
        self.kind = kind
        self.calls = 0

    def compute(self, ctx):
        return {}

    def describe_metrics(self):
        return []

    def taps(self, model):
        return [GradientTap(TARGETS[self.kind], self.kind, self.on_gradient)]

    def on_gradient(self, gradient):
        if self.scene.state.loop.step == 2:
            self.calls += 1
            if self.calls == 1:
                self.act()


def assert_run_of_others(run: Run) -> None:
    """Fail unless the run had the bytes of the bare one, apart from tables of hooks in which taps were."""
    digests, final = bare_run(CASE)
    assert len(run.digests) == len(digests)
    for expected, found in zip(digests, run.digests, strict=True):
        different = differences(expected, found)
        assert [name for name in different if not name.startswith(("gradient hooks/", "module hooks/"))] == []
    assert not differences(final, run.final)


def assert_caught(run: Run, kind: str) -> None:
    assert isinstance(run.error, StateMutationError), run.error
    assert f"Hook 'vandal' at tap on '{TARGETS[kind]}' of step 2 may only read, but changed the" in str(run.error)
    assert run.saved == []


def assert_no_effect_or_caught(vandal: TappingVandal, *, audit: bool) -> None:
    run = train_with(vandal, CASE, audit=audit, checkpoint_every=1, raises=StateMutationError)
    assert vandal.done
    if HARMLESS.issuperset(vandal.deeds):
        assert run.error is None
    if run.error is None:
        assert_run_of_others(run)
    else:
        assert_caught(run, vandal.kind)
    if vandal.kind == "parameter":
        assert (run.error is None) == (vandal.deeds[0] in HARMLESS | NOTHING_TO_DO)


OFTEN = {"edit_the_learning_rate", "move_batchnorm_statistics", "evaluate_for_good", "leave_a_forward_hook"}


def every_kind_of_tap(names: set[str], *, always: set[str]) -> pytest.MarkDecorator:
    """Try deeds in every kind of tap; without ``slow``, in the taps of a parameter and those of ``always`` in all."""
    rows = [
        pytest.param(kind, name, id=f"{kind}-{name}", marks=slow_unless(kind == "parameter" or name in always))
        for kind in TARGETS
        for name in sorted(names - (ON_GRADIENTS if kind == "input" else set()))
    ]
    return pytest.mark.parametrize(("kind", "name"), rows)


@every_kind_of_tap(DEEDS.keys() - SEEN, always=set())
def test_misbehaving_tap_is_harmless_or_caught_by_audit(kind, name):
    """A mutation in a tap either has no effect on the run or raises under audit."""
    assert_no_effect_or_caught(TappingVandal([name], kind), audit=True)


@every_kind_of_tap(SEEN | HARMLESS, always=OFTEN)
def test_misbehaving_tap_is_harmless_or_caught_immediately(kind, name):
    """A mutation in a tap either has no effect on the run or raises without an audit."""
    assert_no_effect_or_caught(TappingVandal([name], kind), audit=False)


PUT_BACK = [
    *("evaluate_for_good", "freeze_the_model", "change_dropout", "replace_a_gradient", "leave_a_forward_hook"),
    *("change_the_default_dtype", "demand_determinism", "change_the_number_of_threads"),
    *("leave_a_forward_pre_hook", *sorted(HARMLESS)),
]


@pytest.mark.parametrize("name", PUT_BACK)
def test_mutations_of_a_raising_tap_are_undone(name):
    """With on_error="skip", the run has the bytes of the run without the hook."""
    run = train_with(TappingVandal([name], raises=True), CASE, on_error="skip")
    assert_run_of_others(run)
    assert [error["error"] for error in run.manager.hooks.failures.errors] == ["Spite: and raised"]


NOT_PUT_BACK = ["edit_the_learning_rate", "write_in_place", "move_batchnorm_statistics", "lower_all_precisions"]


@pytest.mark.parametrize("name", NOT_PUT_BACK)
def test_irreversible_mutations_of_raising_tap_are_reported(name):
    """StateMutationError names the parameter if the mutation cannot be undone."""
    run = train_with(TappingVandal([name], raises=True), CASE, audit=False, on_error="skip", raises=StateMutationError)
    assert_caught(run, "parameter")


def test_tap_computing_gradients_does_not_trigger_itself():
    """A tap that runs its own backward pass is called once, and the run is unchanged."""
    vandal = TappingVandal([], "output")
    vandal.act = lambda: grads_by_hand(vandal.scene)
    assert_run_of_others(train_with(vandal, CASE, audit=False))
    assert vandal.calls == 1


def grads_by_hand(scene) -> None:
    with torch.enable_grad():
        output = scene.model[0](torch.ones(2, 4))
        torch.autograd.grad(output.sum(), [*scene.model[0].parameters(), output])


class Rewriting(TappingVandal):
    """Writes the bytes that are there over a weight, at every call of either of its taps."""

    def taps(self, model):
        return [GradientTap(target, "parameter", self.on_gradient) for target in ("0.weight", "4.weight")]

    @torch.no_grad()
    def on_gradient(self, gradient):
        self.calls += 1
        self.scene.parameter.mul_(1)


def test_tap_rewriting_equal_bytes_raises_no_alarm():
    """A tap writes the bytes of a weight back at each of 18 calls, and the run is unchanged."""
    vandal = Rewriting([])
    run = train_with(vandal, CASE, audit=False, steps=9)
    assert vandal.calls == 18
    assert differences(bare_run(CASE, steps=9)[1], run.final) == []
