"""The guarantees of every registered hook, in both loops, on every model and optimizer."""

import io
import itertools
from functools import cache
from operator import attrgetter

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import (
    EVERY_STEP,
    HookPoint,
    HookRegistry,
    InterventionHook,
    StatePart,
    TrainingHook,
    treatments,
    windows_for,
)
from loopscope.hooks.selection import hook_kind
from loopscope.state.digest import described

from tests.support import (
    CASES,
    LOOPS,
    MODELS,
    OPTIMIZERS,
    ActingHook,
    Case,
    Run,
    SpyHook,
    WatchedManager,
    assert_same_bytes,
    at,
    build,
    differences,
    run_info,
    train,
)
from tests.support.cases import FEW_PASSES, HEADS_AS_ROUTERS, PAIRS, always_on, every_hook_and_case, slow_unless
from tests.support.processes import own_process

QUIET = [hook.name for hook in HookRegistry if not (issubclass(hook, InterventionHook) and hook.commits)]
COMMITTING = [hook.name for hook in HookRegistry if hook_kind(hook) == "committing"]
LENGTHS = [pytest.param(3, id="3"), pytest.param(13, marks=pytest.mark.slow, id="13")]
THRESHOLDS = {"qk_clip": {"threshold": 1e-3}}
"""Options with which a committing hook changes so small a model."""
HEALTH = "Step [0-9,]+"
"""The start of the warnings about the run's health, which these tests ignore."""
pytestmark = pytest.mark.filterwarnings(f"ignore:{HEALTH}")
PREFIXES = {
    StatePart.GRADIENTS: ("gradients/",),
    StatePart.PARAMETERS: ("parameters/", "requires_grad/"),
    StatePart.OPTIMIZER: ("optimizer/",),
}

ORDERED = [
    Case(model, optimizer, loop)
    for (model, loop), optimizer in zip(itertools.product(MODELS, LOOPS), itertools.cycle(OPTIMIZERS), strict=False)
]
"""Each model in each loop."""
ADDED = [Case("batchnorm_mlp", optimizer, loop) for optimizer, loop in zip(OPTIMIZERS, LOOPS, strict=False)]
"""One model in each loop."""
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_length = pytest.mark.parametrize("steps", LENGTHS)


def make(name: str) -> TrainingHook:
    """Make a hook with its default options, few passes, or a threshold that it passes; it fires at every step."""
    hook = HookRegistry.get(name)(**(FEW_PASSES | HEADS_AS_ROUTERS | THRESHOLDS).get(name, {}))
    hook.step_schedule = EVERY_STEP
    return hook


@cache
def refusal(name: str, case: Case) -> str:
    """Return the error with which a hook refuses a model or loop before the run, or an empty string."""
    if not fires(name, case.loop):
        return f"{name} is never called in this loop"
    task, state = build(case)
    hook = make(name)
    try:
        hook.start(run_info(task, HookManager([hook], task, state, loop=case.loop), case.loop))
    except UsageError as error:
        return str(error)
    return ""


def fires(name: str, loop: str) -> bool:
    """Return whether a loop reaches any point of a hook."""
    hook = HookRegistry.get(name)
    return bool(windows_for(hook.hook_points, hook.loop_points, loop))


def supported(names: list[str], case: Case) -> list[str]:
    return [name for name in names if not refusal(name, case)]


@cache
def reference(case: Case) -> dict[str, torch.Tensor]:
    """Return the weights of a longer run, for hooks that need a reference solution."""
    model = train(case, steps=6, audit=False).task.model
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@cache
def alone(name: str, case: Case, steps: int) -> Run:
    return train(case, [make(name)], steps=steps, reference_weights=reference(case), audit=True)


@cache
def together(case: Case, steps: int) -> Run:
    """Train with all quiet hooks and one that draws random numbers; audit the cases whose bytes are compared."""
    hooks = [*map(make, supported(QUIET, case)), SpyHook(drawing)]
    return train(case, hooks, steps=steps, audit=case in ORDERED, reference_weights=reference(case))


def drawing(ctx):
    return {"draw": torch.rand(())}


def numbers(run: Run, name: str) -> str:
    """Return every number that a hook reported, as text, which is exact and represents NaN."""
    return described(run.sink.rows(name + "/"))


@pytest.mark.parametrize("name", QUIET + COMMITTING)
def test_every_hook_runs_in_a_fast_case(name):
    """The cases that always run cover every model and loop, and one accepts the hook if any case does."""
    cases = always_on(name)
    assert {case.model for case in cases} == {case.model for case in CASES}
    assert {case.loop for case in cases} == {*LOOPS}
    assert supported_in_any(cases, name) or not supported_in_any(CASES, name)


def supported_in_any(cases: list[Case], name: str) -> bool:
    return not all(refusal(name, case) for case in cases)


def test_pairs_and_all_hooks_together_meet_every_case():
    for pair in itertools.starmap(attrgetter, itertools.combinations(["model", "optimizer", "loop"], 2)):
        assert {*map(pair, PAIRS)} == {*map(pair, CASES)}
    assert {case for name in QUIET for case in always_on(name)} == {*CASES}


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("observers-change-nothing")
@every_length
@every_hook_and_case(QUIET)
def test_hooked_run_matches_bare_run(name, case, steps):
    """The training state has the same bytes at every step, or the hook is refused by name."""
    if refused := refusal(name, case):
        assert name in refused
        return
    assert_same_bytes(alone(name, case, steps), case, steps)


@pytest.mark.slow
@pytest.mark.guarantee("hooks-are-independent")
@every_length
@pytest.mark.parametrize("case", CASES, ids=str)
@own_process
def test_hook_order_changes_no_results(case, steps):
    """Reversing the order of the observers and interventions changes no byte of the run and no metric."""
    names = supported(QUIET, case)
    forward = together(case, steps)
    hooks = map(make, reversed(names))
    backward = train(case, hooks, steps=steps, audit=False, reference_weights=reference(case))
    assert_same_bytes(forward, case, steps)
    assert_same_bytes(backward, case, steps)
    for name in names:
        assert numbers(forward, name) == numbers(backward, name)


@pytest.fixture(scope="module")
def runs_of_all_hooks() -> None:
    """Train the runs that several tests compare with, before the first of them."""
    for case in ADDED:
        together(case, 3)


@pytest.mark.slow_rows("0-batchnorm_mlp-adamw_foreach-epoch-3")
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("hooks-are-independent")
@every_length
@pytest.mark.parametrize("case", [pytest.param(case, id=str(case), marks=slow_unless(case in ADDED)) for case in CASES])
@pytest.mark.parametrize("half", [0, 1])
def test_adding_hooks_changes_no_other_hooks_numbers(half, case, steps, runs_of_all_hooks):
    """Each half of the hooks reports together with all hooks what it reports alone."""
    for name in supported(QUIET, case)[half::2]:
        if case in always_on(name):
            assert numbers(together(case, steps), name) == numbers(alone(name, case, steps), name)


@pytest.mark.slow
@every_length
@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=slow_unless(case.model != "transformer")) for case in CASES]
)
def test_adding_hooks_keeps_metrics_in_slow_cases(case, steps):
    """The metrics of a hook are the same alone and next to all other hooks, in the cases that are marked slow."""
    for name in supported(QUIET, case):
        if case not in always_on(name):
            assert numbers(together(case, steps), name) == numbers(alone(name, case, steps), name)


@every_hook_and_case(QUIET)
def test_hook_reports_metrics_in_its_loops(name, case):
    """A hook emits metrics exactly in the loops that visit one of its points."""
    if refusal(name, case):
        return
    assert bool(alone(name, case, 3).sink.rows(name + "/")) == fires(name, case.loop)


@pytest.mark.guarantee("numbers-match-plain-formulas")
@every_hook_and_case(QUIET + COMMITTING)
def test_every_metric_that_a_hook_emits_is_described(name, case):
    """Every metric that a hook emits is in its ``describe_metrics()``."""
    if refusal(name, case):
        return
    infos = HookRegistry.get(name)().describe_metrics()
    assert all(info.formula and info.range and info.reading for info in infos)
    emitted = {row[0].removeprefix(name + "/") for row in alone(name, case, 3).sink.rows(name + "/")}
    assert {metric for metric in emitted if not any(info.describes(metric) for info in infos)} == set()


@every_hook_and_case(QUIET + COMMITTING)
def test_hook_state_survives_a_weights_only_file(name, case):
    """The state is the same after torch.save, torch.load with weights_only=True and load_state_dict."""
    if refusal(name, case):
        return
    run = alone(name, case, 3)
    (hook,) = [hook for hook in run.manager.hooks if hook.name == name]
    file = io.BytesIO()
    torch.save(hook.state_dict(), file)
    file.seek(0)
    fresh = make(name)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert described(fresh.state_dict()) == described(hook.state_dict())


@every_hook_and_case(QUIET + COMMITTING, quick=1)
def test_a_hook_that_was_reset_is_as_new(name, case):
    if refusal(name, case):
        return
    hook = make(name)
    train(case, [hook], audit=False, reference_weights=reference(case))
    hook.reset()
    assert described(hook.state_dict()) == described(make(name).state_dict())
    again = train(case, [hook], audit=False, reference_weights=reference(case))
    assert numbers(again, name) == numbers(alone(name, case, 3), name)


@pytest.mark.guarantee("hooks-are-independent")
@every_hook_and_case(QUIET + COMMITTING, quick=1)
def test_offloaded_hook_state_gives_same_metrics(name, case):
    """With offload_state=True every metric of the hook is unchanged."""
    if refusal(name, case):
        return
    offloaded = train(case, [make(name)], audit=False, offload_state=True, reference_weights=reference(case))
    assert numbers(offloaded, name) == numbers(alone(name, case, 3), name)


class WatchingManager(WatchedManager):
    """A manager that records, by hook point, which entries of the training state changed."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.changes: dict[HookPoint, set[str]] = {}

    def watch_call(self, point, call):
        digest_before = self.state.digest()
        call()
        self.changes.setdefault(point, set()).update(differences(digest_before, self.state.digest()))


@pytest.mark.guarantee("commits-are-declared")
@every_length
@every_hook_and_case(COMMITTING)
def test_committing_hook_changes_only_declared_parts(name, case, steps):
    """The changed entries and the recorded treatment match the parts that the hook declares in commits."""
    if refused := refusal(name, case):
        assert name in refused
        return
    hook = HookRegistry.get(name)
    run = train(case, [make(name)], steps=steps, manager_class=WatchingManager, audit=True)
    changed = {entry for entries in run.manager.changes.values() for entry in entries}
    allowed = tuple(prefix for part in hook.commits for prefix in PREFIXES[part])
    assert [entry for entry in changed if not entry.startswith(allowed)] == []
    assert treatments(run.manager.hooks) == {name: tuple(sorted(part.value for part in hook.commits))}


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.guarantee("commits-are-declared")
@every_hook_and_case(COMMITTING)
def test_committing_hooks_apply_in_the_order_named(name, case):
    """Several committing hooks change the run in the order in which the user named them."""
    if refused := refusal(name, case):
        assert name in refused
        return
    hook = HookRegistry.get(name)
    points = windows_for(hook.hook_points, hook.loop_points, case.loop)
    probe = at(ActingHook, *points, name="probe", mutates=False, commits=frozenset(StatePart))
    seen = {"probe first": [], "probe last": []}
    for order, rows in seen.items():
        hooks = [probe(lambda ctx, model_ctx, rows=rows: rows.append(committable(ctx.model))), make(name)]
        train(case, hooks if order == "probe first" else hooks[::-1], audit=True)
    before, after = [], []
    train(case, [make(name)], manager_class=recording_manager(points, before, after), audit=True)
    assert seen["probe first"] == before
    assert seen["probe last"] == after
    assert before != after


def recording_manager(points, before, after):
    class RecordingManager(WatchedManager):
        def watch_call(self, point, call):
            if point in points:
                before.append(committable(self.task.model))
            call()
            if point in points:
                after.append(committable(self.task.model))

    return RecordingManager


def committable(model: torch.nn.Module) -> str:
    """Return the state that a hook can commit to, as text: parameters and gradients."""
    return described({name: (parameter, parameter.grad) for name, parameter in model.named_parameters()})
