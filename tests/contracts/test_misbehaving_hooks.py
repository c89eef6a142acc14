"""A misbehaving hook leaves the run unchanged, or the run ends with an error that names the hook and its change."""

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
from loopscope.hooks import HookPoint, InterventionHook, TrainingHook, windows_for
from loopscope.state.settings.flags import GlobalFlags

from tests.support import CASES, Case, RecordingSink, Run, SpyHook, assert_same_bytes, at, bare_run, differences, train
from tests.support.cases import some_of
from tests.support.misbehaving_hooks import DETECTED_BY_TRIPWIRE, HARMLESS, MUTATIONS, MisbehavingHook, Scene

POINTS = sorted(HookPoint)
CASE = Case()


class MisbehavingObserver(MisbehavingHook, TrainingHook):
    """A misbehaving observer."""

    name = "misbehaving"
    hook_points = frozenset(HookPoint)

    def compute(self, ctx):
        return self.act(ctx)

    def describe_metrics(self):
        return []


class MisbehavingIntervention(MisbehavingHook, InterventionHook):
    """A misbehaving intervention, which is rolled back."""

    name = "misbehaving"
    hook_points = frozenset(HookPoint) - {HookPoint.PRE_UPDATE}
    needs_grads = True
    needs_prev_step_grads = True

    def intervene(self, run_ctx, model_ctx):
        return self.act(run_ctx)

    def describe_metrics(self):
        return []


class MisbehavingReader(MisbehavingIntervention):
    """A misbehaving intervention that declares ``mutates = False``."""

    mutates = False


class MisbehavingSink(MisbehavingHook, RecordingSink):
    """A misbehaving sink."""

    def __init__(self, mutations, *, raises=False):
        MisbehavingHook.__init__(self, mutations, raises=raises)
        RecordingSink.__init__(self, name="misbehaving")

    def emit(self, metrics: Mapping, epoch, hook_point, *, step):
        self.act()


@contextmanager
def restored_process_settings() -> Iterator[None]:
    """Restore the settings of the process, which a run that ends with an error leaves unrestored."""
    flags = GlobalFlags()
    original_flags, bit_generator = flags.read_all(), np.random.get_bit_generator()
    try:
        yield
    finally:
        flags.restore(original_flags)
        np.random.set_bit_generator(bit_generator)


def train_with(mutator: MisbehavingHook, case: Case, **options) -> Run:
    """Train with a misbehaving hook or sink that has access to task and state."""

    def introduce(task, state):
        mutator.scene = Scene(task, state)

    if isinstance(mutator, RecordingSink):
        options["sinks"] = [mutator]
    elif isinstance(mutator, TrainingHook):
        options.setdefault("hooks", [mutator])
    with restored_process_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the manager warns about skipped hooks
        try:
            return train(case, introduce=introduce, **{"audit": True, **options})
        finally:
            mutator.scene.left_behind = None


def only_at(hook_class: type, *points: HookPoint) -> type:
    return type("misbehaving", (hook_class,), {"hook_points": frozenset(points) & hook_class.hook_points})


def assert_caught(run: Run, *, where: str) -> None:
    """Fail unless the run ended with an error that names the hook, and saved no damaged state."""
    assert isinstance(run.error, StateMutationError), run.error
    assert "'misbehaving'" in str(run.error)
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


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", MUTATIONS)
def test_misbehaving_intervention_leaves_no_trace(name):
    """The run rolls back each mutation at POST_STEP and POST_EPOCH and matches the bare run."""
    mutator = only_at(MisbehavingIntervention, HookPoint.POST_STEP, HookPoint.POST_EPOCH)([name])
    assert_same_bytes(train_with(mutator, CASE), CASE)
    assert mutator.done == 4


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", MUTATIONS)
def test_misbehaving_observer_has_no_effect_or_is_caught(name):
    """Harmless mutations leave the run unchanged, and the others raise an error that names POST_STEP of step 1."""
    mutator = only_at(MisbehavingObserver, HookPoint.POST_STEP)([name])
    run = train_with(mutator, CASE, checkpoint_every=1, raises=StateMutationError)
    assert mutator.done
    if name in HARMLESS:
        assert run.error is None
        assert_same_bytes(run, CASE)
    else:
        assert_caught(run, where="POST_STEP of step 1")


@pytest.mark.parametrize("name", sorted(DETECTED_BY_TRIPWIRE))
def test_tripwire_detects_mutation_without_audit(name):
    mutator = only_at(MisbehavingObserver, HookPoint.POST_STEP)([name])
    assert_caught(train_with(mutator, CASE, audit=False, raises=StateMutationError), where="POST_STEP of step 1")


# Any mutations, at any points, on any model, with and without an exception

mutations = st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=1, max_size=3)
points = st.sets(st.sampled_from(POINTS), min_size=1).map(sorted)
cases = st.sampled_from(CASES)
FEW = settings(max_examples=8, deadline=None, derandomize=True)
MANY = settings(max_examples=500, deadline=None)


def assert_no_trace(names: list[str], where: list[HookPoint], case: Case, *, raises: bool) -> None:
    mutator = only_at(MisbehavingIntervention, *where)(names, raises=raises)
    assert_same_bytes(train_with(mutator, case, on_error="skip"), case)


def assert_no_effect_or_caught(kind: type, names: list[str], where: list[HookPoint], case: Case, raises: bool) -> None:
    mutator = only_at(kind, *where)(names, raises=raises)
    run = train_with(mutator, case, on_error="skip", checkpoint_every=1, raises=StateMutationError)
    if run.error is None:
        assert_same_bytes(run, case)
        return
    points_of_loop = windows_for(mutator.hook_points, mutator.loop_points, case.loop)
    culprits = [f"Hook 'misbehaving' at {point.name} of step " for point in points_of_loop]
    assert any(caller in str(run.error) for caller in culprits)
    bare_digests = bare_run(case)[0][: len(run.digests)]
    assert [differences(*pair) for pair in zip(bare_digests, run.digests, strict=True)] == [[]] * len(bare_digests)
    assert_saved_states_intact(run)


@pytest.mark.guarantee("interventions-are-undone")
@FEW
@given(mutations, points, cases, st.booleans())
@pytest.mark.process
def test_no_intervention_leaves_a_trace(names, where, case, raises):
    """An intervention with any sequence of mutations, even one that raises half-way, changes no byte of the run."""
    assert_no_trace(names, where, case, raises=raises)


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@FEW
@given(st.sampled_from([MisbehavingObserver, MisbehavingReader]), mutations, points, cases, st.booleans())
def test_read_only_hook_is_harmless_or_caught(kind, names, where, case, raises):
    """Hypothesis combines mutations, hook points and cases for observers and read-only interventions."""
    assert_no_effect_or_caught(kind, names, where, case, raises)


@pytest.mark.slow
@MANY
@given(mutations, points, cases, st.booleans())
def test_many_interventions_leave_no_trace(names, where, case, raises):
    assert_no_trace(names, where, case, raises=raises)


@pytest.mark.slow
@MANY
@given(st.sampled_from([MisbehavingObserver, MisbehavingReader]), mutations, points, cases, st.booleans())
def test_many_read_only_hooks_stay_harmless_or_caught(kind, names, where, case, raises):
    """The slow variant of the property checks many more combinations."""
    assert_no_effect_or_caught(kind, names, where, case, raises)


# Misbehaving evaluations and sinks, and misbehaving hook methods outside visits


def evaluating(mutator: MisbehavingHook):
    def evaluate(model):
        mutator.act()
        return {"val_acc": 0.5}

    return evaluate


@cache
def run_with_constant_evaluation() -> Run:
    return train(CASE, evaluate=lambda model: {"val_acc": 0.5}, audit=False)


MUTATIONS_WITHIN_STEPS = {
    "write_to_the_batch",
    "write_to_the_batch_through_numpy",
    "write_to_the_kept_gradients",
    "write_to_everything_in_flight",
}
MUTATIONS_BETWEEN_STEPS = sorted(MUTATIONS.keys() - MUTATIONS_WITHIN_STEPS)


@pytest.mark.parametrize("name", some_of(MUTATIONS_BETWEEN_STEPS, 3))
def test_an_evaluation_has_no_effect_or_is_caught(name):
    mutator = MisbehavingHook([name])
    run = train_with(mutator, CASE, evaluate=evaluating(mutator), checkpoint_every=1, raises=StateMutationError)
    assert mutator.done
    if name in HARMLESS | {"evaluate_for_good"} or run.error is None:
        assert differences(run_with_constant_evaluation().final, run.final) == []
    else:
        assert "The 'evaluation' at the loop of step 3 may only read, but changed" in str(run.error)
        assert run.saved == []


@pytest.mark.parametrize("name", some_of(MUTATIONS_BETWEEN_STEPS, 3))
def test_a_sink_has_no_effect_or_is_caught(name):
    mutator = MisbehavingSink([name])
    run = train_with(mutator, CASE, hooks=[reporting()], raises=StateMutationError)
    assert mutator.done
    if name in HARMLESS:
        assert_same_bytes(run, CASE)
    else:
        assert_caught(run, where="Sink 'misbehaving'")


def reporting() -> SpyHook:
    return at(SpyHook, HookPoint.POST_EPOCH)(lambda ctx: {"x": 1.0})


class MisbehavingOutsideDispatch(MisbehavingObserver):
    """An observer that misbehaves in every method except ``compute``."""

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


METHODS_OUTSIDE_DISPATCH = {"start", "check", "end", "state_dict", "describe_metrics"}


def checkpointed(mutator: MisbehavingHook, **options) -> Run:
    """Train with a misbehaving hook and collect the contents of a checkpoint after every step."""
    return train_with(mutator, CASE, checkpoint_every=1, save=lambda run: RunState(run.manager).take(), **options)


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", sorted(HARMLESS))
def test_draws_outside_dispatch_have_no_effect(name):
    """A hook that draws random numbers in start, check, end or state_dict leaves the run unchanged."""
    mutator = MisbehavingOutsideDispatch([name])
    assert_same_bytes(checkpointed(mutator), CASE)
    assert mutator.done > 4


@pytest.mark.longer
@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("method", sorted(METHODS_OUTSIDE_DISPATCH))
@pytest.mark.parametrize("name", ["write_through_data", "edit_the_learning_rate", "leave_a_forward_hook"])
def test_state_change_outside_visits_is_caught(name, method):
    """The error names the method, such as check or state_dict, and the step."""
    quiet = {other: lambda self, *args: {} for other in METHODS_OUTSIDE_DISPATCH - {method}}
    mutator = type("misbehaving", (MisbehavingOutsideDispatch,), quiet)([name])
    run = checkpointed(mutator, raises=StateMutationError)
    assert_caught(run, where=f"at {method} of step")


class LateObserver(MisbehavingObserver):
    """An observer that makes its mutations from its call ``first`` on."""

    def __init__(self, mutations, first):
        super().__init__(mutations)
        self.first, self.calls = first, 0

    def act(self, ctx=None):
        self.calls += 1
        return super().act(ctx) if self.calls >= self.first else {}


@pytest.mark.parametrize("name", ["write_through_data", "write_to_the_optimizer_through_data", "write_to_the_storage"])
def test_late_raw_write_is_caught_at_doubled_calls(name):
    """Without the audit, the run compares bytes whenever the number of calls has doubled, here at step 8."""
    mutator = only_at(LateObserver, HookPoint.POST_STEP)([name], 5)
    run = train_with(mutator, CASE, audit=False, raises=StateMutationError, steps=9)
    assert "'misbehaving' at POST_STEP of step 8 may only read, but changed the training state: " in str(run.error)


class Reader(TrainingHook):
    """An observer that reads the learning rate."""

    name = "reader"
    hook_points = frozenset({HookPoint.POST_STEP})

    def compute(self, ctx):
        return {"lr": ctx.lr}

    def describe_metrics(self):
        return []


@pytest.mark.parametrize("name", ["clear_the_optimizer_state", "append_an_empty_parameter_group"])
def test_late_change_is_not_blamed_on_others_alone(name):
    """Late calls share a check: an error names the hook alone, or all hooks that may have made the change."""
    mutator = only_at(LateObserver, HookPoint.POST_STEP)([name], 6)
    run = train_with(mutator, CASE, hooks=[Reader(), mutator], audit=False, raises=StateMutationError, steps=9)
    assert_caught(run, where="at POST_STEP of step 6")
