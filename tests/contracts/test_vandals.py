"""Whatever a hook does, the run is the run that would have come out without it, or it ends and says who did what."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.errors import StateMutationError
from framework.flags import GlobalFlags
from framework.hook_points import STEP_POINTS, HookPoint
from framework.hooks import InterventionHook, TrainingHook
from tests.support import CASES, Case, RecordingSink, Run, assert_same_bytes, bare_run, build, differences, train
from tests.vandals import DEEDS, HARMLESS, SEEN, Scene, Vandal

POINTS = sorted(HookPoint)
CASE = Case()


class VandalObserver(Vandal, TrainingHook):
    """A vandal that may only read."""

    name = "vandal"
    hook_points = frozenset(HookPoint)

    def compute(self, ctx):
        return self.act(ctx)

    def describe_metrics(self):
        return []


class VandalIntervention(Vandal, InterventionHook):
    """A vandal that is rolled back."""

    name = "vandal"
    hook_points = frozenset(HookPoint) - {HookPoint.PRE_UPDATE}
    needs_grads = True
    needs_prev_step_grads = True

    def intervene(self, run_ctx, model_ctx):
        return self.act(run_ctx)

    def describe_metrics(self):
        return []


class VandalReader(VandalIntervention):
    """A vandal that promised to change nothing."""

    mutates = False


class VandalSink(Vandal, RecordingSink):
    """A vandal that is only there to write metrics down."""

    def __init__(self, deeds, *, raises=False):
        Vandal.__init__(self, deeds, raises=raises)
        RecordingSink.__init__(self, name="vandal")

    def emit(self, metrics: Mapping, epoch, hook_point, *, step):
        self.act()


@contextmanager
def process_put_back() -> Iterator[None]:
    """Put the settings of the process back, which a run that ends with an error leaves as they are."""
    flags = GlobalFlags()
    before, numpy = flags.read_all(), np.random.get_bit_generator()
    try:
        yield
    finally:
        flags.restore(before)
        np.random.set_bit_generator(numpy)


def train_with(vandal: Vandal, case: Case, **options) -> Run:
    """Train with a vandal as hook or sink, letting it get hold of everything."""

    def introduce(task, state):
        vandal.scene = Scene(task, state)

    spot = {"sinks": [vandal]} if isinstance(vandal, RecordingSink) else {"hooks": [vandal]}
    with process_put_back():
        try:
            return train(case, introduce=introduce, **spot, **options)
        finally:
            vandal.scene.left_behind = None


def only_at(vandal_class: type, *points: HookPoint) -> type:
    return type("vandal", (vandal_class,), {"hook_points": frozenset(points) & vandal_class.hook_points})


def assert_caught(run: Run, *, where: str) -> None:
    """Fail unless the run ended because of the vandal, named, and nothing damaged was saved."""
    assert isinstance(run.error, StateMutationError), run.error
    assert "'vandal'" in str(run.error)
    assert where in str(run.error)
    assert "changed the training state: " in str(run.error)
    assert_saved_states_intact(run)


def assert_saved_states_intact(run: Run) -> None:
    digests, _ = bare_run(run.case)
    assert [differences(digests[step - 1], saved) for step, saved in run.saved] == [[]] * len(run.saved)


@pytest.mark.parametrize("name", DEEDS)
def test_a_vandal_that_intervenes_leaves_no_trace(name):
    vandal = only_at(VandalIntervention, HookPoint.POST_STEP, HookPoint.POST_EPOCH)([name])
    assert_same_bytes(train_with(vandal, CASE), CASE)
    assert vandal.done == 4


@pytest.mark.parametrize("name", DEEDS)
def test_a_vandal_that_observes_has_no_effect_or_is_caught(name):
    vandal = only_at(VandalObserver, HookPoint.POST_STEP)([name])
    run = train_with(vandal, CASE, raises=StateMutationError)
    assert vandal.done
    if name in HARMLESS:
        assert run.error is None
        assert_same_bytes(run, CASE)
    else:
        assert_caught(run, where="POST_STEP of step 1")


@pytest.mark.parametrize("name", sorted(SEEN))
def test_the_tripwire_alone_sees(name):
    vandal = only_at(VandalObserver, HookPoint.POST_STEP)([name])
    assert_caught(train_with(vandal, CASE, audit=False, raises=StateMutationError), where="POST_STEP of step 1")
