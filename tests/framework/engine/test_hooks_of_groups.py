"""Hooks enabled by a group are dropped if they raise; hooks enabled by name end the run."""

import json
import warnings
from functools import partial

import loopscope
import pytest
import torch
from loopscope import HookPoint, InterventionHook, TrainingHook
from loopscope.engine import HookManager
from loopscope.errors import HookError, LoopscopeError, RunNotice, StateMutationError, UsageError
from loopscope.hooks import GradientTap, StatePart
from loopscope.state import Transient
from torch import nn

from tests.framework.runs.small_experiment import registered, session
from tests.support import Case, SpyHook, assert_same_bytes, at, build, train

OF_GROUP = partial(HookManager, required=())
POINTS = [point.name for point in HookPoint]
METHODS = ("describe_metrics", "start", "taps", "tap", "end", "table")


class Failing(TrainingHook):
    """A hook that raises in one of its methods, or at one hook point."""

    name = "failing"
    hook_points = frozenset(HookPoint)
    metrics = "value | 1 | 1 | one"
    needs_grads = True

    def __init__(self, *, where: str = "", error: type[BaseException] = ValueError, at_step: int = 0) -> None:
        self.where, self.error, self.at_step = where, error, at_step

    def maybe_raise(self, where: str, step: int = 0) -> None:
        if where == self.where and step >= self.at_step:
            raise self.error("cannot read this model")

    def describe_metrics(self):
        self.maybe_raise("describe_metrics")
        return super().describe_metrics()

    def start(self, run):
        self.maybe_raise("start")

    def taps(self, model):
        self.maybe_raise("taps")
        name = next(name for name, _ in model.named_parameters())
        return [GradientTap(name, "parameter", lambda gradient: self.maybe_raise("tap"))]

    def compute(self, ctx):
        self.maybe_raise(ctx.hook_point.name, ctx.step)
        return {"value": 1.0} if self.at_step else {}

    def check(self, values, step):
        self.maybe_raise("check", step)

    def end(self, status):
        self.maybe_raise("end")

    def table(self):
        self.maybe_raise("table")
        return {}

    def reset(self):
        self.maybe_raise("reset")

    def state_dict(self):
        self.maybe_raise("state_dict")
        return {}

    def load_state_dict(self, state):
        self.maybe_raise("load_state_dict")


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("where", [*METHODS, *POINTS])
def test_failing_hook_of_a_group_is_dropped(where: str) -> None:
    """For any error, the run has the same bytes as without hooks, and the other hooks continue."""
    spy = at(SpyHook, HookPoint.POST_STEP)()
    with pytest.warns(RunNotice, match="Left out: Hook 'failing' raised at .*cannot read this model") as record:
        run = train(Case(), [Failing(where=where), spy], manager_class=OF_GROUP, checkpoint_every=1)
    assert "cannot read this model" in run.manager.hooks.failures.left_out["failing"]
    assert len([item for item in record if "Left out" in str(item.message)]) == 1
    assert run.manager.hooks.failures.errors == []
    assert len(spy.seen) == run.state.loop.step > 0
    assert_same_bytes(run, Case())


@pytest.mark.some_rows(3)
@pytest.mark.parametrize(
    "error", [UsageError, MemoryError, SystemExit, ZeroDivisionError, AttributeError, LoopscopeError]
)
@pytest.mark.parametrize("where", ["start", "POST_STEP"])
def test_any_error_drops_a_hook_of_a_group(where: str, error: type[BaseException]) -> None:
    with pytest.warns(RunNotice, match=f"Left out: Hook 'failing' raised at {where}"):
        run = train(Case(), [Failing(where=where, error=error)], manager_class=OF_GROUP)
    assert run.error is None


@pytest.mark.some_rows(3)
@pytest.mark.parametrize("where", ["describe_metrics", "start", "taps", "tap", "PRE_STEP", "POST_EPOCH", "end"])
def test_failing_named_hook_ends_the_run(where: str) -> None:
    manager = partial(HookManager, required=["failing"])
    with pytest.raises(HookError, match=f"'failing' raised at {where}"):
        train(Case(), [Failing(where=where)], manager_class=manager)


@pytest.mark.some_rows(2)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("where", ["POST_STEP", "PRE_UPDATE", "check"])
def test_hook_that_has_reported_is_dropped(where: str) -> None:
    """A hook of a group that raises after its first report does not end the run."""
    with pytest.warns(RunNotice, match=f"'failing' raised at {where} of step 3: "):
        run = train(Case(), [Failing(where=where, at_step=3)], manager_class=OF_GROUP)
    assert run.error is None
    assert_same_bytes(run, Case())


@pytest.mark.parametrize("where", ["state_dict", "load_state_dict", "reset"])
def test_errors_in_states_and_resets_drop_the_hook(where: str) -> None:
    task, state = build(Case())
    manager = HookManager([Failing(where=where), SpyHook()], task, state, required=())
    arguments = [{"failing": {}, "spy": {}}] if where == "load_state_dict" else []
    with pytest.warns(RunNotice, match=f"'failing' raised at {where}: "):
        getattr(manager.hooks, where)(*arguments)
    assert [hook.name for hook in manager.hooks] == ["spy"]


def test_mutation_by_hook_of_a_group_is_fatal() -> None:
    def write(ctx):
        with torch.no_grad():
            next(ctx.model.parameters()).mul_(2)

    with pytest.raises(StateMutationError, match="'spy' at PRE_STEP of step 1"):
        train(Case(), [at(SpyHook, HookPoint.PRE_STEP)(write)], manager_class=OF_GROUP)


class Overreaching(InterventionHook):
    """Commits a change that it does not declare."""

    name = "overreaching"
    hook_points = frozenset({HookPoint.POST_BACKWARD})
    metrics = "value | 1 | 1 | one"
    commits = frozenset({StatePart.PARAMETERS})

    def intervene(self, run_ctx, model_ctx):
        model_ctx.scale_gradients(0.5)
        return {"value": 1.0}


def test_undeclared_commit_drops_the_hook() -> None:
    """No commit was applied, so the run continues with the correct state."""
    with pytest.warns(RunNotice, match="Left out: Hook 'overreaching' raised at POST_BACKWARD of step 1"):
        run = train(Case(), [Overreaching()], manager_class=OF_GROUP)
    assert_same_bytes(run, Case())


class Needy(TrainingHook):
    name = "needy"
    hook_points = frozenset({HookPoint.POST_STEP, HookPoint.POST_EPOCH})
    metrics = "value | 1 | 1 | one"

    def compute(self, ctx):
        return {}


NEEDS = ("needs_grads", "needs_prev_step_grads", "needs_step_series", "needs_pre_epoch_state")


def unable(*arguments, **options):
    raise NotImplementedError("no such kernel")


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("required", [(), ("needy",)])
def test_failing_requirement_drops_the_hook(need: str, required, monkeypatch) -> None:
    """A hook of a group is dropped if its requirement cannot be computed; for a named hook the error is raised."""
    hook = type("Needy", (Needy,), {need: True})()
    monkeypatch.setattr("loopscope.engine.driver.accumulate", unable)
    monkeypatch.setattr("loopscope.engine.driver._append_column", unable)

    def prepare(task, state):
        if need == "needs_prev_step_grads":
            parameter = next(task.model.parameters())
            parameter.register_post_accumulate_grad_hook(lambda leaf: setattr(leaf, "grad", Unclonable(leaf.grad)))
        if need == "needs_pre_epoch_state":
            monkeypatch.setattr("loopscope.isolation.guardian.copy_each", unable)

    run = partial(train, Case(), [hook], introduce=prepare, every_step=False, audit=False)
    if required:
        with pytest.raises(NotImplementedError):
            run(manager_class=partial(HookManager, required=required))
        return
    with pytest.warns(RunNotice, match=f"'needy' cannot run: {need} failed with NotImplementedError: no such kernel"):
        run(manager_class=OF_GROUP)


class Unclonable(torch.Tensor):
    """A gradient whose ``clone`` raises."""

    def __new__(cls, gradient: torch.Tensor):
        return gradient.as_subclass(cls)

    def clone(self, **options):
        return unable()


class Acting(InterventionHook):
    name = "acting"
    hook_points = frozenset({HookPoint.SNAPSHOT})
    metrics = "value | 1 | 1 | one"

    def intervene(self, run_ctx, model_ctx):
        return {"value": 1.0}


def test_unreadable_state_drops_interventions() -> None:
    add_iterator = lambda task, state: setattr(task.model, "stream", iter([1]))
    with pytest.warns(RunNotice, match="Left out: Hook 'acting' cannot run: start failed with"):
        run = train(
            Case(), [Acting(), SpyHook()], manager_class=OF_GROUP, introduce=add_iterator, every_step=False, audit=False
        )
    assert [hook.name for hook in run.manager.hooks] == ["spy"]
    assert not issubclass(type(iter([1])), Transient)
    with pytest.raises(UsageError, match="out of reach"):
        train(Case(), [Acting()], introduce=add_iterator, every_step=False, audit=False)


class Lost(TrainingHook):
    """Taps a layer that does not exist."""

    name = "lost"
    hook_points = frozenset({HookPoint.POST_STEP})
    metrics = "value | 1 | 1 | one"

    def taps(self, model):
        return [GradientTap("nowhere", "output", lambda gradient: None)]

    def compute(self, ctx):
        return {}


def test_invalid_tap_drops_the_hook() -> None:
    """The taps of other hooks are attached nevertheless."""
    called = []
    other = Failing()
    other.maybe_raise = lambda where, step=0: called.append(where)
    with pytest.warns(RunNotice, match="'lost' cannot run: taps failed with"):
        train(Case(), [other, Lost()], manager_class=OF_GROUP)
    assert "tap" in called
    with pytest.raises(UsageError, match="nowhere"):
        train(Case(), [Lost()])


# Hooks selected by attach() and by sessions


def attached(folder, *, state=None, steps=2, model=None, **options):
    """Train a few steps with attached hooks; return the summary and the state of the scope."""
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"sinks": ["jsonl"], "display": "none", "out": folder, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with loopscope.attach(model, optimizer, **options) as scope:
            if state is not None:
                scope.load_state_dict(state)
            for x in scope.batches([torch.ones(2, 4)] * steps):
                scope.backward(model(x).pow(2).mean())
                optimizer.step()
                optimizer.zero_grad()
            scope_state = scope.state_dict()
    return json.loads((folder / "summary.json").read_text()), scope_state


class Late(TrainingHook):
    """Raises in the method ``where``, in its ``last``-th call."""

    name = "late"
    hook_points = frozenset({HookPoint.POST_STEP})
    metrics = "value | 1 | 1 | one"
    last, where = 1, "compute"

    def __init__(self) -> None:
        if self.where == "__init__":
            raise ValueError("cannot be made")
        self.calls = 0

    def compute(self, ctx):
        self.calls += 1
        if self.calls >= self.last and self.where == "compute":
            raise ValueError("cannot continue")
        return {"value": 1.0}

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        if self.where == "load_state_dict":
            raise ValueError("cannot load this")


def late(where: str, last: int = 1) -> type[TrainingHook]:
    return type("Late", (Late,), {"where": where, "last": last})


@pytest.fixture(autouse=True)
def without_other_observers(monkeypatch):
    """Replace the group of observers by a small one; the complete group takes a second."""
    from loopscope.hooks.selection import groups

    monkeypatch.setattr(groups, "bulk_hooks", lambda keyword: ["late", "norms"])


@pytest.mark.longer
@pytest.mark.parametrize("where", ["compute", "__init__"])
def test_attach_drops_a_failing_hook_of_a_group(tmp_path, where: str) -> None:
    with registered(late(where)):
        summary, _ = attached(tmp_path / "group", with_hooks="observers")
        assert "cannot " in summary["hooks_left_out"]["late"]
        assert summary["status"] == "completed"
        for named in ({"hooks": ["late"]}, {"with_hooks": "observers", "hooks": ["late"]}):
            with pytest.raises((HookError, UsageError), match=r"'late'.*cannot "):
                attached(tmp_path / str(len(named)), on_hook_error="raise", **named)


@pytest.mark.longer
@pytest.mark.parametrize("where", ["compute", "__init__"])
def test_session_drops_a_failing_hook_of_a_group(tmp_path, where: str) -> None:
    with registered(late(where)):
        with pytest.warns(RunNotice, match="Left out: Hook 'late'"):
            (summary,) = session(tmp_path / "group", strategies=["plain"], epochs=1, with_hooks="observers").run()
        assert "cannot " in summary["hooks_left_out"]["late"]
        options = {"with_hooks": "observers", "hooks": ["late"]}
        with pytest.raises((HookError, UsageError), match=r"'late'.*cannot "):
            session(tmp_path / "named", strategies=["plain"], epochs=1, **options).run()


def test_options_that_a_hook_refuses_are_refused(tmp_path) -> None:
    """The user requested the options, so a hook that cannot be created with them is not dropped silently."""

    class WithOption(Late):
        def __init__(self, *, width: int = 1) -> None:
            raise ValueError(f"width {width} is not supported")

    with registered(WithOption), pytest.raises(UsageError, match=r"'late' cannot be created with \(width=2\)"):
        attached(tmp_path, with_hooks="observers", hook_options={"late": {"width": 2}})


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("where", ["compute", "load_state_dict"])
def test_a_failure_after_an_interruption_drops_the_hook(tmp_path, where: str, reports: bool) -> None:
    """A hook of a group that fails in the resumed run is left out, whether it had reported or not."""
    earlier = late("nowhere")
    if not reports:
        earlier.compute = lambda self, ctx: {}
    with registered(earlier):
        _, state = attached(tmp_path, with_hooks="observers")
    with registered(late(where)):
        summary, _ = attached(tmp_path, with_hooks="observers", state=state)
    assert "cannot " in summary["hooks_left_out"]["late"]
