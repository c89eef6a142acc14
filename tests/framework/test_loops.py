"""The epoch loop and the step loop: state kept for hooks, stopping, and division into batches and passes."""

from collections.abc import Callable

import pytest
import torch
from loopscope.data import TensorLoader, fixed_order
from loopscope.engine import Driver, HookManager
from loopscope.errors import HookError
from loopscope.hooks import STEP_POINTS, HookPoint, StatePart, StepSchedule
from loopscope.isolation import StateCopy
from loopscope.loops import epoch_loop, evaluate, step_loop
from loopscope.state import RandomStreams, TrainingState
from loopscope.training import TrainingTask
from torch import Tensor, nn

from tests.support import ActingHook, Case, Mishap, ReadOnlyHook, SpyHook, assert_same_bytes, at, build, train

Gradients = dict[str, Tensor]


def watch(*points: HookPoint, look: Callable, **attributes) -> SpyHook:
    """Return an observer with class attributes such as ``needs_grads``."""
    return at(SpyHook, *points, **attributes)(look)


class GradientLog(at(SpyHook, HookPoint.POST_BACKWARD)):
    """Records the gradients of every step at POST_BACKWARD."""

    name = "gradient_log"

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Gradients] = []

    def compute(self, ctx):
        self.steps.append({name: value.grad.clone() for name, value in ctx.model.named_parameters()})
        return {}


class Halve(at(ReadOnlyHook, HookPoint.POST_BACKWARD)):
    """Commits half of every gradient."""

    commits = frozenset({StatePart.GRADIENTS})
    needs_grads = needs_prev_step_grads = False

    def __init__(self) -> None:
        super().__init__(lambda run_ctx, model_ctx: model_ctx.scale_gradients(0.5))


def copied(gradients) -> Gradients | None:
    return None if gradients is None else {name: value.clone() for name, value in gradients.items()}


def equal(a: Gradients, b: Gradients) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.guarantee("hooks-are-independent")
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_loop_keeps_nothing_without_a_request(loop):
    """Gradients and the pre-epoch state are None in both loops."""
    values: list[object] = []
    state: list[TrainingState] = []

    def record(ctx) -> None:
        loop_state = state[0].loop
        values.extend([loop_state.gradient_sum, loop_state.accumulated_grads])
        values.extend([loop_state.prev_step_grads, loop_state.current_grads])
        values.extend([loop_state.pre_epoch, ctx.accumulated_grads, ctx.prev_step_grads])

    task, new_state = build(Case(loop=loop), steps=6)
    state.append(new_state)
    manager = HookManager([SpyHook(record)], task, new_state, loop=loop)
    (epoch_loop if loop == "epoch" else step_loop)(task, manager)
    assert values
    assert set(values) == {None}


@pytest.mark.parametrize("treatments", [[], [Halve()]])
def test_accumulated_gradients_are_epoch_mean_before_commits(treatments):
    """The mean does not depend on an intervention that halves the gradients."""
    log, seen = GradientLog(), []
    look = watch(HookPoint.POST_EPOCH, look=lambda ctx: seen.append(copied(ctx.accumulated_grads)), needs_grads=True)
    train(Case(), [log, look, *treatments], steps=6)
    for epoch, accumulated in enumerate(seen):
        steps = log.steps[3 * epoch : 3 * epoch + 3]
        for name, mean in accumulated.items():
            assert torch.allclose(mean, sum(step[name] for step in steps) / 3, rtol=1e-5, atol=1e-8)


def test_step_loop_accumulates_since_the_last_snapshot():
    log, seen = GradientLog(), []
    look = watch(HookPoint.SNAPSHOT, look=lambda ctx: seen.append(copied(ctx.accumulated_grads)), needs_grads=True)
    train(Case(loop="step"), [log, look], steps=4, log_every=1, snapshot_every=2)
    for window, accumulated in enumerate(seen):
        first, second = log.steps[2 * window : 2 * window + 2]
        for name, mean in accumulated.items():
            assert torch.allclose(mean, (first[name] + second[name]) / 2, rtol=1e-5, atol=1e-8)


@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["epoch", "step"])
@pytest.mark.parametrize("treatments", [[], [Halve()]])
def test_previous_gradients_precede_commits(loop, treatments):
    """The hook sees the gradients of the previous step, and None at the first step."""
    log, seen = GradientLog(), []
    look = watch(HookPoint.PRE_STEP, look=lambda ctx: seen.append(copied(ctx.prev_step_grads)),
                 needs_prev_step_grads=True)  # fmt: skip
    train(Case(loop=loop), [log, look, *treatments], steps=5 if loop == "step" else 6)
    assert seen[0] is None
    assert all(equal(previous, step) for previous, step in zip(seen[1:], log.steps[:-1], strict=True))


@pytest.mark.longer
@pytest.mark.some_rows(2)
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_previous_gradients_are_kept_only_for_due_steps(loop):
    schedule = StepSchedule(mode="burst", every_n_steps=4, burst_length=2, warmup=1)
    hook = watch(*STEP_POINTS, look=lambda ctx: None, needs_prev_step_grads=True, step_schedule=schedule)
    steps: list[int] = []
    look = watch(*STEP_POINTS, look=lambda ctx: ctx.prev_step_grads and steps.append(ctx.step), name="looker")
    train(Case(loop=loop), [hook, look], steps=9)
    assert steps == [step for step in (2, 3, 6, 7) for _ in range(4)]


def test_previous_gradients_exist_when_window_opens():
    """A hook that starts in epoch 1 has them at its first step."""
    window = {"epoch": {HookPoint.PRE_STEP: (1, 1)}}
    steps: list[int] = []
    hook = watch(look=lambda ctx: ctx.prev_step_grads and steps.append(ctx.step), loop_points=window,
                 needs_prev_step_grads=True)  # fmt: skip
    train(Case(), [hook], steps=9)
    assert steps == [4, 5, 6]


def restoring_hook(points: set[HookPoint], results: list) -> ActingHook:
    """Return an intervention that records whether ``restore_pre_epoch`` restores the weights of PRE_EPOCH."""
    start: list[list[Tensor]] = []

    def act(run_ctx, model_ctx) -> None:
        if run_ctx.hook_point is HookPoint.PRE_EPOCH:
            start.append([parameter.detach().clone() for parameter in run_ctx.model.parameters()])
            return
        model_ctx.restore_pre_epoch()
        is_restored = all(map(torch.equal, start[-1], run_ctx.model.parameters()))
        results.append((run_ctx.hook_point.name, run_ctx.epoch, is_restored))

    return at(ActingHook, HookPoint.PRE_EPOCH, *points)(act)


@pytest.mark.longer
def test_intervention_can_restore_pre_epoch_state():
    """The restore works at POST_EPOCH and SNAPSHOT, and the bytes of the run are unchanged."""
    results: list = []
    run = train(
        Case(), [restoring_hook({HookPoint.POST_EPOCH, HookPoint.SNAPSHOT}, results)], steps=6, snapshot_every=2
    )
    assert results == [("POST_EPOCH", 0, True), ("POST_EPOCH", 1, True), ("SNAPSHOT", 1, True)]
    assert_same_bytes(run, Case(), 6)


def test_early_stop_snapshot_has_pre_epoch_state():
    results: list = []
    hook = restoring_hook({HookPoint.SNAPSHOT}, results)
    train(Case(), [hook], steps=30, snapshot_every=10, should_stop=lambda evaluation: len(evaluation) > 0)
    assert results == [("SNAPSHOT", 0, True)]


class CountingSnapshot(StateCopy):
    """Counts its copies of the state."""

    copies = 0

    def save(self, state):
        self.copies += 1
        return super().save(state)


@pytest.mark.parametrize(("window", "expected"), [((None, None), 3), ((1, 1), 1), ((5, None), 0)])
def test_pre_epoch_state_is_copied_only_when_needed(window, expected):
    """The count of copies follows the epoch window of the hook."""
    hook_class = at(ActingHook, loop_points={"epoch": {HookPoint.POST_EPOCH: window}})
    task, state = build(Case(), steps=9)
    manager = HookManager([hook_class(lambda *ctx: None)], task, state)
    manager.pre_epoch_copy = CountingSnapshot()
    epoch_loop(task, manager)
    assert manager.pre_epoch_copy.copies == expected


def stop_at_step(step: int, steps: list[int]) -> Callable[[dict[str, float]], bool]:
    return lambda evaluation: bool(steps) and steps[-1] >= step


@pytest.mark.parametrize(("loop", "epoch"), [("epoch", 1), ("step", 1)])
def test_should_stop_ends_run_with_snapshot(loop, epoch):
    """The state records the epoch and step at which the target was reached."""
    steps: list[int] = []
    spy = watch(*STEP_POINTS, HookPoint.SNAPSHOT, look=lambda ctx: steps.append(ctx.step))
    run = train(Case(loop=loop), [spy], steps=30, snapshot_every=100, eval_every=1 if loop == "epoch" else 2,
                should_stop=stop_at_step(5, steps))  # fmt: skip
    assert run.state.loop.stopped
    assert run.state.loop.reached == {"epoch": epoch, "step": 6}
    assert spy.seen[-1] == ("SNAPSHOT", epoch, 6)


@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_stopped_run_stays_stopped(loop):
    task, state = build(Case(loop=loop), steps=6, should_stop=lambda evaluation: True)
    run_loop = epoch_loop if loop == "epoch" else step_loop
    run_loop(task, HookManager([], task, state, loop=loop))
    step = state.loop.step
    run_loop(task, HookManager([], task, state, loop=loop))
    assert state.loop.step == step < 6


@pytest.mark.longer
@pytest.mark.guarantee("resumed-runs-are-identical")
@pytest.mark.parametrize("loop", ["epoch", "step"])
def test_split_run_dispatches_like_a_whole_run(loop):
    """Two shorter runs have the same calls and weights under a burst schedule."""

    def calls_and_weights(*lengths: int) -> list:
        task, state = build(Case(loop=loop), snapshot_every=100)
        schedule = StepSchedule(mode="burst", every_n_steps=4, burst_length=2, warmup=1)
        spy = at(SpyHook, *STEP_POINTS, step_schedule=schedule)()
        for length in lengths:
            task.length = length
            (epoch_loop if loop == "epoch" else step_loop)(task, HookManager([spy], task, state, loop=loop))
        return [*spy.seen, state.digest()["parameters/0.weight"]]

    if loop == "epoch":
        assert calls_and_weights(1, 3) == calls_and_weights(3)
    else:
        assert calls_and_weights(3, 4, 9) == calls_and_weights(9)


def test_step_loop_continues_over_several_epochs():
    """Epochs, batch indices and data match the loader."""
    places: list[tuple] = []
    look = watch(HookPoint.PRE_STEP, look=lambda ctx: places.append((ctx.epoch, ctx.batch_idx, ctx.batch_data[0])))
    run = train(Case(loop="step"), [look], steps=8)
    assert [(epoch, index) for epoch, index, _ in places] == [divmod(step, 3) for step in range(8)]
    expected = [batch[0] for epoch in range(3) for batch in run.task.loader.batches(epoch)][:8]
    assert all(map(torch.equal, (data for *_, data in places), expected))


@pytest.mark.parametrize(("loop", "expected"), [("epoch", 3), ("step", 4)])
def test_checkpoints_follow_the_requested_interval(loop, expected):
    assert train(Case(loop=loop), steps=9, checkpoint_every=1 if loop == "epoch" else 2).checkpoints == expected


def test_evaluation_uses_eval_mode_without_gradients():
    """Modes are restored per module, so that a frozen BatchNorm stays in eval mode."""
    calls: list[tuple] = []
    task, state = build(Case(), evaluate=lambda model: calls.append((modes(model), torch.is_grad_enabled())) or {})
    task.model[1].eval()  # a frozen BatchNorm, which must stay in eval mode
    modes_before = modes(task.model)
    evaluate(Driver(task, HookManager([], task, state)))
    assert calls == [([False] * len(modes_before), False)]
    assert modes(task.model) == modes_before
    assert modes_before.count(False) == 1


def test_evaluation_restores_modes_after_an_error():
    def failing_evaluation(model):
        raise Mishap("in the middle")

    task, state = build(Case(), evaluate=failing_evaluation)
    digest_before = state.digest()
    with pytest.raises(Mishap):
        evaluate(Driver(task, HookManager([], task, state)))
    assert state.digest() == digest_before


def modes(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


def test_raising_hook_ends_run_at_its_step():
    """The error names the hook, the point and the step."""

    def raise_at_two(ctx) -> None:
        if ctx.step == 2:
            raise Mishap("at two")

    run = train(Case(), [watch(HookPoint.POST_STEP, look=raise_at_two)], raises=HookError)
    assert str(run.error).startswith("Hook 'spy' raised at POST_STEP of step 2: Mishap: at two [")
    assert run.state.loop.step == 2


def float64_run(accumulation_steps: int, structure: Callable) -> tuple[list[Tensor], list[Tensor]]:
    """Train two steps on batches of 7 rows in float64 and return losses and weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(14, 3, dtype=torch.float64), torch.randint(2, (14,))
    losses: list[Tensor] = []

    class Structured(TensorLoader):
        def batches(self, epoch, start=0):
            return (structure(x, y) for x, y in super().batches(epoch, start))

    def loss(model, batch):
        x, y = batch.values() if isinstance(batch, dict) else batch
        return nn.functional.cross_entropy(model(x), y)

    task = TrainingTask(model, optimizer, Structured(data, 7, fixed_order(torch.arange(14))), loss,
                        accumulation_steps=accumulation_steps)  # fmt: skip
    hook = watch(HookPoint.POST_STEP, look=lambda ctx: losses.append(ctx.loss.clone()))
    epoch_loop(task, HookManager([hook], task, TrainingState(model, optimizer, RandomStreams(0))))
    return losses, [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("structure", [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"x": x, "y": y}])
@pytest.mark.parametrize("pieces", [2, 3, 7, 9])
def test_micro_batches_match_the_complete_batch(pieces, structure):
    complete, divided = float64_run(1, structure), float64_run(pieces, structure)
    for expected, found in zip(complete, divided, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-15) for a, b in zip(expected, found, strict=True))
