"""The hook manager: order of hook calls, contexts, and handling of hook errors."""

from dataclasses import FrozenInstanceError, fields
from functools import partial
from types import MappingProxyType

import numpy as np
import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import HookError, StateMutationError, UsageError
from loopscope.hooks import (
    STEP_POINTS,
    HookPoint,
    InterventionHook,
    MetricInfo,
    MetricSink,
    StatePart,
    StepSchedule,
    TrainingHook,
    treatments,
)
from loopscope.loops import epoch_loop
from loopscope.state import RandomStreams
from loopscope.training import Profiler
from torch import Tensor

from tests.support import (
    ROWS,
    ActingHook,
    Case,
    Mishap,
    ReadOnlyHook,
    RecordingSink,
    SpyHook,
    assert_same_bytes,
    at,
    build,
    differences,
    raising,
    run_info,
    train,
)

POST_BACKWARD = HookPoint.POST_BACKWARD


def named(hook_class: type[TrainingHook], name: str, *points: HookPoint, **attributes) -> type[TrainingHook]:
    return at(hook_class, *points, name=name, **attributes)


def recording(calls: list[str], name: str):
    return lambda *contexts: calls.append(name) or {}


def test_visit_order_follows_hook_kinds():
    """Observers run first, then interventions, then committing hooks in their given order."""
    calls: list[str] = []

    def make(hook_class, name, **attributes):
        return named(hook_class, name, POST_BACKWARD, **attributes)(recording(calls, name))

    commits = {"commits": frozenset({StatePart.GRADIENTS})}
    hooks = [
        make(ReadOnlyHook, "second_commit", **commits),
        make(ActingHook, "intervention"),
        make(ReadOnlyHook, "first_commit", **commits),
        make(SpyHook, "observer"),
    ]
    train(Case(), hooks, steps=1)
    assert calls[:4] == ["observer", "intervention", "second_commit", "first_commit"]


def test_interventions_read_observer_metrics():
    """An intervention reads the metrics that observers returned at the same point."""
    read: list[float] = []

    def read_metrics(run_ctx, model_ctx) -> None:
        read.append(float(run_ctx.get_last_metrics(POST_BACKWARD)["spy/step"]))

    observer = at(SpyHook, POST_BACKWARD)(lambda ctx: {"step": torch.tensor(ctx.step)})
    train(Case(), [at(ActingHook, POST_BACKWARD)(read_metrics), observer])
    assert read == [1, 2, 3]


def test_last_metrics_are_the_newest():
    """get_last_metrics() returns the newest values of one point or of all points."""
    seen: list[tuple] = []

    def look(ctx):
        here, everywhere = ctx.get_last_metrics(HookPoint.POST_EPOCH), ctx.get_last_metrics()
        seen.append((ctx.hook_point.name, ctx.epoch, here.get("spy/n"), everywhere.get("spy/n")))
        return {"n": 10 * ctx.epoch + (0 if ctx.hook_point is HookPoint.PRE_EPOCH else 1)}

    train(Case(), [at(SpyHook, HookPoint.PRE_EPOCH, HookPoint.POST_EPOCH)(look)], steps=6)
    assert seen == [("PRE_EPOCH", 0, None, None), ("POST_EPOCH", 0, None, 0),
                    ("PRE_EPOCH", 1, 1, 1), ("POST_EPOCH", 1, 1, 10)]  # fmt: skip


def test_last_metrics_are_copies():
    """A hook that clears the mapping does not change the view of any hook."""
    seen: list[dict] = []

    def look(ctx):
        last = ctx.get_last_metrics()
        seen.append(dict(last))
        last.clear()
        return {"n": 1.0}

    train(Case(), [at(SpyHook, HookPoint.POST_STEP)(look)])
    assert [set(view) for view in seen] == [set(), {"spy/n"}, {"spy/n"}]


def test_intervention_observes_outside_its_intervention_points():
    calls: list[str] = []

    class Both(at(ActingHook, *STEP_POINTS)):
        intervention_points = frozenset({HookPoint.POST_STEP})

        def compute(self, ctx):
            calls.append(f"observes at {ctx.hook_point.name}")
            return {}

    train(Case(), [Both(lambda run_ctx, model_ctx: calls.append(f"intervenes at {run_ctx.hook_point.name}"))], steps=1)
    assert calls[:4] == [
        "observes at PRE_STEP", "observes at POST_BACKWARD", "observes at PRE_UPDATE", "intervenes at POST_STEP"
    ]  # fmt: skip


ALWAYS_SET = {
    "hook_point",
    "epoch",
    "step",
    "skipped_steps",
    "model",
    "config",
    "loader",
    "services",
    "profiler",
    "lr",
    "step_lr",
}
BATCH = {"batch_idx", "batch_data"}
EVALUATED = {"train_acc", "val_acc", "evaluation"}
ON_REQUEST = {"prev_step_grads"}
SET_IN_EPOCH_LOOP = {
    "PRE_EPOCH": EVALUATED,
    "PRE_STEP": BATCH | ON_REQUEST,
    "POST_BACKWARD": BATCH | ON_REQUEST | {"loss"},
    "PRE_UPDATE": BATCH | ON_REQUEST | {"loss"},
    "POST_STEP": BATCH | ON_REQUEST | {"loss"},
    "POST_EPOCH": EVALUATED | {"loss", "accumulated_grads"},
    "SNAPSHOT": EVALUATED | {"loss", "accumulated_grads"},
}
SET_IN_STEP_LOOP = {name: fields for name, fields in SET_IN_EPOCH_LOOP.items() if HookPoint[name] in STEP_POINTS} | {
    "SNAPSHOT": SET_IN_EPOCH_LOOP["SNAPSHOT"]
}


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize(("loop", "table"), [("epoch", SET_IN_EPOCH_LOOP), ("step", SET_IN_STEP_LOOP)])
def test_context_fields_match_the_table(loop, table):
    """Every field is set at exactly the points where the table lists it, in both loops."""
    fields_by_point: dict[str, set[str]] = {}

    def look(ctx):
        values = {item.name: getattr(ctx, item.name) for item in fields(ctx)}
        present = {name for name, value in values.items() if value is not None and value not in ({}, ())}
        fields_by_point[ctx.hook_point.name] = present - ALWAYS_SET
        assert present >= ALWAYS_SET

    hook = at(SpyHook, *HookPoint, needs_grads=True, needs_prev_step_grads=True)(look)
    train(Case(loop=loop), [hook], steps=6, snapshot_every=1, eval_every=1, log_every=1)
    assert fields_by_point == table


def test_loss_is_step_tensor_or_epoch_mean():
    """ctx.loss is a scalar tensor at steps and the mean of the epoch at its end."""
    losses: list = []
    train(Case(), [SpyHook(lambda ctx: losses.append((ctx.hook_point.name, ctx.loss)))])
    step_losses = [loss for name, loss in losses if name == "POST_STEP"]
    assert all(isinstance(loss, Tensor) and loss.ndim == 0 for loss in step_losses)
    epoch_losses = [loss for name, loss in losses if name in ("POST_EPOCH", "SNAPSHOT")]
    assert epoch_losses == pytest.approx([sum(loss.item() for loss in step_losses) / 3] * 2, rel=1e-6)


@pytest.mark.longer
def test_evaluation_is_available_until_the_next_step():
    seen: list[tuple] = []
    spy = SpyHook(lambda ctx: seen.append((ctx.hook_point.name, ctx.epoch, ctx.val_acc, dict(ctx.evaluation))))
    train(Case(), [spy], steps=9, eval_every=2, evaluate=lambda model: {"val_acc": 0.5, "val_loss": 2.0})
    shown = [(point, epoch) for point, epoch, accuracy, _ in seen if accuracy is not None]
    assert shown == [("POST_EPOCH", 1), ("SNAPSHOT", 1), ("PRE_EPOCH", 2), ("POST_EPOCH", 2), ("SNAPSHOT", 2)]
    assert {tuple(evaluation.items()) for *_, evaluation in seen} == {(), (("val_acc", 0.5), ("val_loss", 2.0))}


def test_context_is_frozen_with_readonly_mappings():
    def check(ctx) -> None:
        with pytest.raises(FrozenInstanceError):
            ctx.epoch = 5
        with pytest.raises((AttributeError, TypeError)):
            ctx.anything = 5
        for mapping in (ctx.evaluation, ctx.accumulated_grads, ctx.prev_step_grads):
            assert mapping is None or type(mapping) is MappingProxyType

    points = HookPoint.POST_STEP, HookPoint.POST_EPOCH
    hook = at(SpyHook, *points, needs_grads=True, needs_prev_step_grads=True)(check)
    train(Case(), [hook])
    assert len(hook.seen) == 4


class CountingStreams(RandomStreams):
    """Counts how often the run's streams are saved."""

    visits = 0

    def save(self):
        self.visits += 1
        return super().save()


@pytest.mark.guarantee("hooks-are-independent")
def test_point_without_due_hooks_is_skipped():
    """The manager does not switch random streams at a point where no hook runs."""
    task, state = build(Case())
    state.streams = CountingStreams(7)
    schedule = StepSchedule(mode="stride", every_n_steps=3)
    manager = HookManager([at(SpyHook, HookPoint.POST_STEP, step_schedule=schedule)()], task, state)
    manager.start(run_info(task, manager, "epoch"))
    state.loop.step, state.streams.visits = 2, 0
    for point in HookPoint:
        manager.fire(point)
    assert state.streams.visits == 0
    state.loop.step = 4
    manager.fire(HookPoint.POST_STEP)
    assert state.streams.visits == 1


@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("hook_class", [SpyHook, ActingHook, ReadOnlyHook])
def test_raising_hook_is_reported_with_location(hook_class):
    """HookError has the hook, point, step and source line, and the manager records the error."""
    run = train(Case(), [at(hook_class, HookPoint.POST_STEP)(raising)], steps=3, raises=HookError)
    assert str(run.error).startswith(f"Hook {hook_class.name!r} raised at POST_STEP of step 1: Mishap: on purpose [")
    assert 'in raising: raise Mishap("on purpose")]' in str(run.error)
    assert isinstance(run.error.__cause__, Mishap)
    (error,) = run.manager.hooks.failures.errors
    assert error.pop("traceback").endswith(".Mishap: on purpose\n")
    assert error == {"hook": hook_class.name, "point": "POST_STEP", "step": 1, "error": "Mishap: on purpose"}


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("errors-are-contained")
@pytest.mark.parametrize("hook_class", [SpyHook, ActingHook, ReadOnlyHook])
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_skipped_hook_leaves_run_unchanged(hook_class, loop):
    """The hook is not called again, a warning is issued, and the run has the bytes of the bare run."""
    other = named(SpyHook, "other", HookPoint.POST_STEP)()
    with pytest.warns(UserWarning, match=r"raised at PRE_STEP of step 1: Mishap.* continues without this hook"):
        run = train(Case(loop=loop), [at(hook_class, *STEP_POINTS - {HookPoint.PRE_UPDATE})(raising), other],
                    on_error="skip")  # fmt: skip
    assert_same_bytes(run, Case(loop=loop))
    assert len(run.manager.hooks.failures.errors) == 1
    assert len(other.seen) == 3
    assert [hook.name for hook in run.manager.hooks] == ["other"]


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (torch.ones(2), r"ValueError: returned a tensor of shape \(2,\)"),
        ({"deep": [torch.ones(1, 1)]}, r"ValueError: returned a tensor of shape \(1, 1\)"),
        ({"by_size": {1: 1.0, "1": 2.0}}, r"ValueError: returned a dict with the keys 1, '1' as 'by_size'"),
    ],
)
@pytest.mark.parametrize("point", [HookPoint.POST_STEP, HookPoint.POST_EPOCH])
def test_non_scalar_metric_is_refused(returned, sentence, point):
    """The error names the hook, point, step and shape."""
    run = train(Case(), [at(SpyHook, point)(lambda ctx: {"bad": returned})], raises=HookError)
    step = 1 if point is HookPoint.POST_STEP else 3
    with pytest.raises(HookError, match=f"Hook 'spy' raised at {point.name} of step {step}: {sentence}"):
        raise run.error


@pytest.mark.parametrize("value", [None, "text", np.complex64(1.0), 1j, [1.0, None], {"deep": {"er": "text"}}])
def test_invalid_metric_value_is_refused(value):
    """The error names the hook, point and step and lists the accepted types."""
    run = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"good": 1.0, "bad": value})], raises=HookError)
    assert "'spy' raised at POST_STEP of step 1: TypeError: returned a " in str(run.error)
    assert "as a metric; a metric is a float, int, bool or zero-dimensional tensor" in str(run.error)


@pytest.mark.parametrize("returned", [[("loss", 1.0)], 3.0, torch.tensor(1.0), "text"])
def test_non_mapping_result_is_refused(returned):
    """The error names the hook, point, step and returned type."""

    class Odd(at(SpyHook, HookPoint.POST_STEP)):
        def compute(self, ctx):
            return returned

    run = train(Case(), [Odd()], raises=HookError)
    assert f"'spy' raised at POST_STEP of step 1: TypeError: returned a {type(returned).__name__}" in str(run.error)


def test_usage_error_at_start_is_unchanged():
    """A UsageError raised in start() keeps its message, even with on_error set to skip."""

    class Picky(SpyHook):
        def start(self, run):
            raise UsageError(f"This hook does not support {type(run.model).__name__}.")

    with pytest.raises(UsageError, match=r"^This hook does not support Sequential\.$"):
        train(Case(), [Picky()], on_error="skip")


def test_usage_error_during_run_becomes_hook_error():
    """The HookError contains the message of the UsageError."""
    hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: ctx.forward(ctx.batch_data[0], capture=["no_such"]))
    run = train(Case(), [hook], raises=HookError)
    assert "POST_STEP of step 1: UsageError: Unknown module 'no_such'" in str(run.error)


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_observer_mutation_is_always_fatal(on_error):
    """A StateMutationError is raised with on_error set to raise or skip."""

    def mutate_state(ctx) -> None:
        next(ctx.model.parameters()).add_(1)

    run = train(Case(), [at(SpyHook, HookPoint.POST_STEP)(mutate_state)], on_error=on_error, raises=StateMutationError)
    assert "Hook 'spy' at POST_STEP of step 1 may only read" in str(run.error)


class Clocked(SpyHook):
    """Records the calls of its life cycle."""

    hook_points = frozenset({HookPoint.POST_EPOCH})

    def __init__(self, log: list, **raises: bool) -> None:
        super().__init__(lambda ctx: log.append("compute") or {"n": 1.0})
        self.log = log
        self.raises = raises

    def start(self, run):
        self.log.append(f"start {run.strategy}")

    def check(self, values, step):
        self.log.append(f"check {values} at {step}")
        if self.raises.get("check"):
            raise Mishap("in check")

    def end(self, status):
        self.log.append(f"end {status}")
        if self.raises.get("end"):
            raise Mishap("in end")


def test_hook_lifecycle_calls_each_method_once():
    """The calls are start, compute, check and end, in this order."""
    log: list[str] = []
    train(Case(), [Clocked(log)])
    assert log == ["start only", "compute", "check {'n': 1.0} at 3", "end completed"]


class Closing(MetricSink):
    """Records its calls and the final status."""

    name = "closing"

    def __init__(self, log: list) -> None:
        self.log = log

    def emit(self, metrics, epoch, hook_point, *, step):
        self.log.append(f"emit {sorted(metrics)}")

    def close(self, status):
        self.log.append(f"close {status}")


def test_all_hooks_and_sinks_are_closed():
    """Each hook ends and each sink closes even if end() of several hooks raises."""
    log: list[str] = []
    second = type("Second", (Clocked,), {"name": "second"})
    task, state = build(Case())
    manager = HookManager([Clocked(log, end=True), second(log, end=True)], task, state, sinks=[Closing(log)])
    manager.start(run_info(task, manager, "epoch"))
    with pytest.raises(HookError, match="raised at end of step 0: Mishap: in end"):
        manager.end("completed")
    assert log[2:] == ["end completed", "end completed", "close completed"]


def test_metrics_of_failed_check_reach_sinks():
    """The values are emitted before check() of the hook raises."""
    log: list[str] = []
    run = train(Case(), [Clocked(log, check=True)], sinks=[Closing(log)], raises=HookError)
    assert str(run.error).startswith("Hook 'spy' raised at check of step 3: Mishap: in check [")
    assert log[1:] == ["compute", "emit ['spy/n']", "check {'n': 1.0} at 3", "end failed", "close failed"]


def test_hook_states_are_restored_by_name():
    """A hook with a name that is not in the saved states keeps its initial state."""

    class Counter(SpyHook):
        count = 0

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]

    first, second = Counter(), named(Counter, "second")()
    first.count, second.count = 3, 4
    saved = HookManager([first, second], *build(Case())).hooks.state_dict()
    assert saved == {"spy": {"count": 3}, "second": {"count": 4}}
    restored, fresh = Counter(), named(Counter, "third")()
    HookManager([restored, fresh], *build(Case())).hooks.load_state_dict(saved)
    assert (restored.count, fresh.count) == (3, 0)


class Loading(SpyHook):
    """Calls a function when its state is saved and when it is restored."""

    def __init__(self, act):
        super().__init__()
        self.act = act

    def state_dict(self):
        self.act()
        return {}

    def load_state_dict(self, state):
        self.act()


def test_hook_random_draws_leave_streams_unchanged():
    """Draws in load_state_dict() and in the measurement of state size do not advance the streams."""
    task, state = build(Case())
    manager = HookManager([Loading(lambda: (torch.rand(3), np.random.rand(2)))], task, state, profile=True)
    before = state.digest()
    manager.hooks.load_state_dict({"spy": {}})
    manager.fire(HookPoint.PRE_EPOCH)
    assert differences(before, state.digest()) == []
    assert "state_bytes" in manager.profiler.report()["spy"]


@pytest.mark.guarantee("observers-change-nothing")
def test_mutation_in_load_state_dict_is_caught():
    """The error names the hook and load_state_dict."""
    task, state = build(Case())
    manager = HookManager([Loading(lambda: task.optimizer.param_groups[0].update(lr=5.0))], task, state)
    with pytest.raises(StateMutationError, match="Hook 'spy' at load_state_dict of step 0 may only read, but changed"):
        manager.hooks.load_state_dict({"spy": {}})


def test_exit_in_load_state_dict_is_refused():
    """A hook that calls sys.exit() while its state is restored raises a UsageError."""
    manager = HookManager([Loading(partial(raising_exit, 0))], *build(Case()))
    with pytest.raises(UsageError, match="The state of hook 'spy' cannot be restored \\(SystemExit: 0 \\["):
        manager.hooks.load_state_dict({"spy": {}})


def raising_exit(status):
    raise SystemExit(status)


def test_duplicate_hook_names_are_refused():
    """The manager raises a UsageError before the run."""
    with pytest.raises(UsageError, match="Two hooks are named 'spy'"):
        HookManager([SpyHook(), SpyHook()], *build(Case()))


def test_metric_infos_and_treatments_are_available_early():
    """The manager lists metric descriptions and treatments before the run starts."""
    info = MetricInfo("size", "‖g‖", "[0, ∞)", "big")
    described = type("Described", (SpyHook,), {"describe_metrics": lambda self: [info]})()
    committing = at(ReadOnlyHook, POST_BACKWARD, commits=frozenset(StatePart))(raising)
    manager = HookManager([described, committing], *build(Case()))
    assert manager.hooks.metric_infos() == {"spy/size": info}
    assert treatments(manager.hooks) == {"read_only": tuple(sorted(part.value for part in StatePart))}


@pytest.mark.parametrize(
    ("name", "metric", "described"),
    [
        ("norm/<parameter>", "norm/0.weight", True),
        ("norm/<parameter>", "norm", False),
        ("norm/<parameter>", "norms/0.weight", False),
        ("norm", "norm", True),
        ("norm", "norm/0.weight", False),
    ],
)
def test_metric_description_matches_names(name, metric, described):
    """A description matches its own metric name, or one name per parameter with the placeholder."""
    info = MetricInfo(name, "", "", "")
    assert info.describes(metric) is described
    assert info.column == "norm"


def test_missing_compute_is_reported():
    """An intervention hook that observes without compute() raises an error with its name and the point."""

    class Idle(InterventionHook):
        name = "idle"
        hook_points = frozenset({HookPoint.POST_STEP})
        intervention_points = frozenset()

        def intervene(self, run_ctx, model_ctx):
            return {}

        def describe_metrics(self):
            return []

    run = train(Case(), [Idle()], raises=HookError)
    assert "'idle' observes at POST_STEP but defines no compute()" in str(run.error)


def test_profiling_counts_every_call_of_every_hook():
    task, state = build(Case())
    hooks = [named(SpyHook, "often", *STEP_POINTS)(), named(SpyHook, "once", HookPoint.POST_EPOCH)()]
    manager = HookManager(hooks, task, state, profile=True, sinks=[RecordingSink()])
    epoch_loop(task, manager)
    report = manager.profiler.report()
    # "start" and "taps" also count as calls.
    assert {name: row["calls"] for name, row in report.items()} == {"often": 2 + 12, "once": 2 + 1}
    assert list(report) == ["often", "once"]
    assert all(row["seconds"] > 0 for row in report.values())


class Hoarding(SpyHook):
    """Has one megabyte of state, and allocates sixty more during a call."""

    name = "hoarding"
    hook_points = frozenset({HookPoint.POST_EPOCH})
    memory = torch.zeros(1)

    def compute(self, ctx):
        self.memory = torch.ones(250_000)
        return {"sum": torch.ones(15_000_000).sum()}

    def state_dict(self):
        return {"memory": self.memory, "again": [self.memory]}


def test_profiling_reports_state_and_peak_memory():
    manager = train(Case(), [Hoarding()], manager_class=partial(HookManager, profile=True)).manager
    report = manager.profiler.report()["hoarding"]
    assert report["state_bytes"] == 1_000_000
    assert 55_000_000 < report["peak_bytes"] < 90_000_000


def test_processed_samples_are_counted_per_hook():
    """Forward, backward and Hessian passes are counted per hook even without profiling."""

    def act(ctx, model_ctx):
        model_ctx.compute_batch_loss()
        model_ctx.compute_batch_gradients()
        model_ctx.hessian_vector_product(model_ctx.compute_batch_gradients())
        model_ctx.run_training_epoch(model_ctx.get_shuffled_loader())

    looking = named(SpyHook, "looking", HookPoint.POST_STEP)(lambda ctx: ctx.forward(ctx.batch_data[0]) and None)
    acting = named(ActingHook, "acting", HookPoint.POST_STEP)(act)
    samples = train(Case(), [looking, acting], steps=3).manager.profiler.samples
    assert samples["looking"] == {"forward": ROWS}
    assert samples["acting"] == {"forward": ROWS, "forward_backward": ROWS * (1 + 1 + 3), "hessian_product": ROWS}


def test_observer_gradients_leave_no_trace():
    """An observer that computes the gradients of a batch changes no byte of the run."""
    results = []

    def probe(ctx):
        results.append(ctx.compute_batch_gradients(ctx.batch_data))

    run = train(Case(model="tied"), [at(SpyHook, HookPoint.POST_BACKWARD)(probe)])
    assert_same_bytes(run, Case(model="tied"))
    assert len(results) == 3
    for gradient in results:
        assert set(gradient) == {name for name, _ in run.task.model.named_parameters()}


def test_profiler_times_failing_sections():
    """A section that raises is timed, and a disabled profiler records no section."""
    on, off = Profiler(enabled=True), Profiler()
    for profiler in (on, off):
        with pytest.raises(Mishap), profiler.section("part"):
            raise Mishap
    assert on.calls == {"part": 1}
    assert off.report() == {}
