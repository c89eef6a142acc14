"""Whatever a hook does, the run is the run that would have come out without it, or it ends and says who did what."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loopscope.checkpoints import RunState
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint, InterventionHook, TrainingHook
from loopscope.state.flags import GlobalFlags

from tests.support import CASES, Case, RecordingSink, Run, SpyHook, assert_same_bytes, at, bare_run, differences, train
from tests.support.cases import some_of
from tests.support.vandals import DEEDS, HARMLESS, SEEN, Scene, Vandal

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

    if isinstance(vandal, RecordingSink):
        options["sinks"] = [vandal]
    elif isinstance(vandal, TrainingHook):
        options["hooks"] = [vandal]
    with process_put_back(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the manager warns of hooks that it skips
        try:
            return train(case, introduce=introduce, **options)
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


@cache
def intact_states(case: Case) -> dict[int, dict[str, int]]:
    """Return the digests, by step, of the checkpoints of the run without hooks."""
    return dict(train(case, checkpoint_every=1, audit=False).saved)


def assert_saved_states_intact(run: Run) -> None:
    if run.saved:
        intact = intact_states(run.case)
        assert [differences(intact[step], saved) for step, saved in run.saved] == [[]] * len(run.saved)


@pytest.mark.parametrize("name", DEEDS)
def test_misbehaving_intervention_leaves_no_trace(name):
    """The run rolls back each mutation at POST_STEP and POST_EPOCH and matches the bare run."""
    vandal = only_at(VandalIntervention, HookPoint.POST_STEP, HookPoint.POST_EPOCH)([name])
    assert_same_bytes(train_with(vandal, CASE), CASE)
    assert vandal.done == 4


@pytest.mark.parametrize("name", DEEDS)
def test_misbehaving_observer_has_no_effect_or_is_caught(name):
    """Harmless mutations leave the run unchanged, and the others raise an error that names POST_STEP of step 1."""
    vandal = only_at(VandalObserver, HookPoint.POST_STEP)([name])
    run = train_with(vandal, CASE, checkpoint_every=1, raises=StateMutationError)
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


# Any deeds, at any points, on any model, raising half-way or not

deeds = st.lists(st.sampled_from(sorted(DEEDS)), min_size=1, max_size=3)
points = st.sets(st.sampled_from(POINTS), min_size=1).map(sorted)
cases = st.sampled_from(CASES)
FEW = settings(max_examples=8, deadline=None, derandomize=True)
MANY = settings(max_examples=500, deadline=None)


def assert_no_trace(names: list[str], where: list[HookPoint], case: Case, *, raises: bool) -> None:
    vandal = only_at(VandalIntervention, *where)(names, raises=raises)
    assert_same_bytes(train_with(vandal, case, on_error="skip"), case)


def assert_no_effect_or_caught(kind: type, names: list[str], where: list[HookPoint], case: Case, raises: bool) -> None:
    vandal = only_at(kind, *where)(names, raises=raises)
    run = train_with(vandal, case, on_error="skip", checkpoint_every=1, raises=StateMutationError)
    if run.error is None:
        assert_same_bytes(run, case)
        return
    culprits = [f"Hook 'vandal' at {point.name} of step " for point in where]
    assert any(culprit in str(run.error) for culprit in culprits)
    before = bare_run(case)[0][: len(run.digests)]
    assert [differences(*pair) for pair in zip(before, run.digests, strict=True)] == [[]] * len(before)
    assert_saved_states_intact(run)


@FEW
@given(deeds, points, cases, st.booleans())
def test_no_intervention_leaves_a_trace(names, where, case, raises):
    assert_no_trace(names, where, case, raises=raises)


@FEW
@given(st.sampled_from([VandalObserver, VandalReader]), deeds, points, cases, st.booleans())
def test_read_only_hook_is_harmless_or_caught(kind, names, where, case, raises):
    """Hypothesis combines mutations, hook points and cases for observers and read-only interventions."""
    assert_no_effect_or_caught(kind, names, where, case, raises)


@pytest.mark.slow
@MANY
@given(deeds, points, cases, st.booleans())
def test_no_intervention_leaves_a_trace_however_many_try(names, where, case, raises):
    assert_no_trace(names, where, case, raises=raises)


@pytest.mark.slow
@MANY
@given(st.sampled_from([VandalObserver, VandalReader]), deeds, points, cases, st.booleans())
def test_many_read_only_hooks_stay_harmless_or_caught(kind, names, where, case, raises):
    """The slow variant of the property checks many more combinations."""
    assert_no_effect_or_caught(kind, names, where, case, raises)


# Vandals that are not hooks, and hooks outside their fires


def evaluating(vandal: Vandal):
    def evaluate(model):
        vandal.act()
        return {"val_acc": 0.5}

    return evaluate


@cache
def run_with_constant_evaluation() -> Run:
    return train(CASE, evaluate=lambda model: {"val_acc": 0.5}, audit=False)


IN_A_STEP = {
    "write_to_the_batch",
    "write_to_the_batch_through_numpy",
    "write_to_the_kept_gradients",
    "write_to_all_that_is_in_flight",
}
BETWEEN_STEPS = sorted(DEEDS.keys() - IN_A_STEP)


@pytest.mark.parametrize("name", some_of(BETWEEN_STEPS, 3))
def test_an_evaluation_has_no_effect_or_is_caught(name):
    vandal = Vandal([name])
    run = train_with(vandal, CASE, evaluate=evaluating(vandal), checkpoint_every=1, raises=StateMutationError)
    assert vandal.done
    if name in HARMLESS | {"evaluate_for_good"} or run.error is None:
        assert differences(run_with_constant_evaluation().final, run.final) == []
    else:
        assert "The 'evaluation' at the loop of step 3 may only read, but changed" in str(run.error)
        assert run.saved == []


@pytest.mark.parametrize("name", some_of(BETWEEN_STEPS, 3))
def test_a_sink_has_no_effect_or_is_caught(name):
    vandal = VandalSink([name])
    run = train_with(vandal, CASE, hooks=[reporting()], raises=StateMutationError)
    assert vandal.done
    if name in HARMLESS:
        assert_same_bytes(run, CASE)
    else:
        assert_caught(run, where="Sink 'vandal'")


def reporting() -> SpyHook:
    return at(SpyHook, HookPoint.POST_EPOCH)(lambda ctx: {"x": 1.0})


class VandalOffStage(VandalObserver):
    """A vandal that misbehaves where hooks describe themselves, prepare, look at their values, are saved and finish."""

    def compute(self, ctx):
        return {"x": 1.0}

    def start(self, run):
        self.act()

    def check(self, values, step):
        self.act()

    def end(self, status):
        self.act()

    def state_dict(self):
        self.act()
        return {}

    def describe_metrics(self):
        self.act()
        yield from ()


OFF_STAGE = {"start", "check", "end", "state_dict", "describe_metrics"}


def checkpointed(vandal: Vandal, **options) -> Run:
    """Train with a vandal, and ask for all that a checkpoint holds as a run does."""
    return train_with(vandal, CASE, checkpoint_every=1, save=lambda run: RunState(run.manager).take(), **options)


@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_draws_outside_dispatch_have_no_effect(name):
    """A hook that draws random numbers in start, check, end or state_dict leaves the run unchanged."""
    vandal = VandalOffStage([name])
    assert_same_bytes(checkpointed(vandal), CASE)
    assert vandal.done > 4


@pytest.mark.parametrize("method", sorted(OFF_STAGE))
@pytest.mark.parametrize("name", ["write_through_data", "edit_the_learning_rate", "leave_a_forward_hook"])
def test_state_change_outside_dispatch_is_caught(name, method):
    """The error names the method, such as check or state_dict, and the step."""
    quiet = {other: lambda self, *args: {} for other in OFF_STAGE - {method}}
    vandal = type("vandal", (VandalOffStage,), quiet)([name])
    run = checkpointed(vandal, raises=StateMutationError)
    assert_caught(run, where=f"at {method} of step")


class Late(VandalObserver):
    """Does its deeds from one of its calls on."""

    def __init__(self, deeds, first):
        super().__init__(deeds)
        self.first, self.calls = first, 0

    def act(self, ctx=None):
        self.calls += 1
        return super().act(ctx) if self.calls >= self.first else {}


@pytest.mark.parametrize("name", ["write_through_data", "write_to_the_optimizer_through_data", "write_to_the_storage"])
def test_late_raw_write_is_caught_at_doubled_calls(name):
    """Without the audit, the run compares bytes whenever the number of calls has doubled, here at step 8."""
    vandal = only_at(Late, HookPoint.POST_STEP)([name], 5)
    run = train_with(vandal, CASE, audit=False, raises=StateMutationError, steps=9)
    assert "'vandal' at POST_STEP of step 8 may only read, but changed the training state: " in str(run.error)
