"""An unstarted manager starts at the first hook point, so that its hooks take effect."""

import pytest
import torch
from loopscope.engine import HookManager
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, InterventionHook
from loopscope.loops import epoch_loop, step_loop
from loopscope.sinks import CSVSink
from loopscope.state import without_on_demand
from loopscope.training_hooks import EmbeddingProvenance, ModelSmoothing, OutputProjectionClip, WeightAverage

from tests.support import LOOPS, Case, RecordingSink, SpyHook, at, build, differences, run_info, train

HOOKS = [
    lambda: ModelSmoothing(update_interval=2),
    lambda: OutputProjectionClip(),
    lambda: WeightAverage(interval=1),
    lambda: EmbeddingProvenance(),
]


def outcome(case: Case, make, *, start: bool):
    """Return the digest at the end of a run and the metrics of one hook."""
    task, state = build(case, steps=6)
    sink = RecordingSink()
    manager = HookManager([make()], task, state, loop=case.loop, sinks=[sink])
    if start:
        manager.start(run_info(task, manager, case.loop))
    (epoch_loop if case.loop == "epoch" else step_loop)(task, manager)
    manager.end("completed")
    return without_on_demand(state.digest()), sink.emitted


@pytest.mark.some_rows(3)
@pytest.mark.guarantee("mistakes-are-refused-early")
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("make", HOOKS, ids=lambda make: type(make()).__name__)
def test_unstarted_manager_matches_a_started_one(make, loop):
    """Final state and metrics of every hook are the same in both loops."""
    case = Case("tied", loop=loop)
    (unstarted, emitted), (started, expected) = [outcome(case, make, start=start) for start in (False, True)]
    assert differences(started, unstarted) == []
    assert repr(emitted) == repr(expected)
    assert emitted
    if issubclass(type(make()), InterventionHook) and type(make()).commits:
        assert differences(train(case, steps=6, audit=False).final, unstarted)


class Recording(SpyHook):
    """Records the RunInfo of its start."""

    def start(self, run):
        self.run = run


@pytest.mark.guarantee("mistakes-are-refused-early")
def test_hook_receives_run_info_without_start():
    """The RunInfo has default names, and the loop, seed, model, task and reference weights of the manager."""
    task, state = build(Case())
    hook = Recording()
    manager = HookManager([hook], task, state, reference_weights={"0.bias": torch.ones(8)})
    manager.fire(HookPoint.PRE_EPOCH)
    run = hook.run
    assert (run.experiment, run.strategy, run.loop, run.seed) == ("unnamed", "unnamed", "epoch", 7)
    assert (run.model, run.task.length, run.steps_per_epoch) == (task.model, task.length, len(task.loader))
    assert (run.optimizer_class, [*run.reference_weights]) == (torch.optim.AdamW, ["0.bias"])
    assert not run.output_dir.exists()


def test_unstarted_manager_starts_only_once():
    task, state = build(Case())
    hook = at(Recording, *HookPoint)()
    manager = HookManager([hook], task, state)
    epoch_loop(task, manager)
    first_run_info = hook.run
    manager.fire(HookPoint.SNAPSHOT)
    assert hook.run is first_run_info
    with pytest.raises(UsageError, match="has already started; create a new one for another run"):
        manager.start(run_info(task, manager, "epoch"))


def test_unsuitable_hook_is_refused_before_first_step():
    """No table of hooks is changed."""
    task, state = build(Case())
    manager = HookManager([OutputProjectionClip()], task, state)
    with pytest.raises(UsageError, match="output_projection_clip"):
        epoch_loop(task, manager)
    assert state.loop.step == 0
    assert manager.hooks.tables == {}


def test_sink_that_needs_a_folder_is_refused(tmp_path, monkeypatch):
    """The error advises to call manager.start, and nothing is trained or written."""
    monkeypatch.chdir(tmp_path)
    task, state = build(Case())
    hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"x": 1.0})
    with pytest.raises(UsageError, match=r"A sink needs the folder .* call manager.start\(RunInfo"):
        epoch_loop(task, HookManager([hook], task, state, sinks=[CSVSink()]))
    assert state.loop.step == 0
    assert [*tmp_path.iterdir()] == []
