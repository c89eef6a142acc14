"""Contract tests of every registered hook on runs with unusual models, optimizers, schedulers and batches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import combinations, count, product
from typing import Any

import pytest
import torch
from loopscope import training_hooks  # noqa: F401 - fills the registry
from loopscope.errors import UsageError
from loopscope.hooks import EVERY_STEP, HookPoint, HookRegistry, TrainingHook
from loopscope.tensors import copied, overwrite
from loopscope.training import TrainingTask, advance_scheduler, takes_closure
from torch import Tensor

from tests.contracts.test_hooks import COMMITTING, HEALTH, PREFIXES, QUIET, THRESHOLDS, WatchingManager, fires
from tests.support import LOOPS, ActingHook, Run, SpyHook, WatchedManager, at, differences
from tests.support.cases import FEW_PASSES, HEADS_AS_ROUTERS, pairwise, slow_unless, turn
from tests.support.odd_batches import parts
from tests.support.odd_runs import BATCHES, PLACES, UPDATES, Odd, odd_loss, train_oddly

pytestmark = pytest.mark.filterwarnings(f"ignore:{HEALTH}")
AXES = (tuple(PLACES), tuple(UPDATES), BATCHES)
OPTIONS: dict[str, dict[str, Any]] = (
    FEW_PASSES
    | HEADS_AS_ROUTERS
    | THRESHOLDS
    | {
        "attention": {"entry": "x", "every": 1},
        "consecutive": {"interval": 2},
        "loss_spikes": {"window": 2, "threshold": 1e9},
        "variance": {"window": 2, "every": 2},
    }
)
"""Options with which hooks have work to do in a run of four steps, and no more than that."""
CLOSURE = "Hook '{name}' changes the .*, but LBFGS computes gradients several times a step"
ADAM = "Hook 'adam_dynamics' reads the moments of torch.optim.Adam or AdamW, but the optimizer"
MOMENTS = (
    "Hook 'optimizer_health' reads second moments, such as those of Adam, RMSprop and Adafactor, but the optimizer"
)
REFUSED = {(name, "closure"): CLOSURE for name in ("grad_clip", "metis_split", "output_projection_clip")} | {
    ("adam_dynamics", update): ADAM for update in UPDATES if update not in ("timm", "lambda")
}
REFUSED |= {("optimizer_health", update): MOMENTS for update in ("preconditioner", "closure", "average and plateau")}
"""The unsupported pairs of hook and update, with the start of the error that refuses the run."""


def rows_of(number: int) -> list[tuple[str, str, str]]:
    """Choose rows for a hook so that it meets every value of each axis, and all hooks together meet every pair."""
    places, updates, batches = AXES
    chosen = [(place, (place + number) % len(updates)) for place in range(len(places))]
    return [(places[i], updates[j], batches[(i + i // 2 + j) % len(batches)]) for i, j in chosen]


CHOSEN = {name: rows_of(number) for name, number in zip(QUIET + COMMITTING, count())}


def every_hook_and_row(names: list[str]) -> pytest.MarkDecorator:
    """Parametrize over hooks and their chosen rows; with ``slow``, over rows with every pair of values of two axes."""
    rows = [
        pytest.param(
            name, odd(name, row), id="-".join((name, *row)), marks=slow_unless(row in CHOSEN[name][turn(name) % 3 :: 3])
        )
        for name in names
        for row in {**dict.fromkeys(CHOSEN[name]), **dict.fromkeys(pairwise(*AXES))}
    ]
    return pytest.mark.parametrize(("name", "odd"), rows)


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the digest of its whole state, and its weights."""

    digest: dict[str, int]
    weights: dict[str, Tensor]

    @classmethod
    def of(cls, run: Run) -> "Outcome":
        return cls(run.final, {name: value.clone() for name, value in run.task.model.state_dict().items()})

    def assert_same_as(self, other: "Outcome") -> None:
        assert differences(self.digest, other.digest) == []
        assert self.changed(other) == []

    def changed(self, other: "Outcome") -> list[str]:
        """Return the names of the weights whose bytes differ."""
        read = lambda weights, name: weights[name].numpy().tobytes()
        return [name for name in self.weights if read(self.weights, name) != read(other.weights, name)]


def odd(name: str, row: tuple[str, str, str]) -> Odd:
    """Make the run of a row, in one of the hook's loops, chosen by the row."""
    loops = [loop for loop in LOOPS if fires(name, loop)]
    return Odd(*row, loop=loops[turn("".join(row)) % len(loops)], low_bit=name == "metis_split")


def make(name: str) -> TrainingHook:
    """Make a hook that is called at every step."""
    hook = HookRegistry.get(name)(**OPTIONS.get(name, {}))
    if name != "metis_split":  # its schedule comes from the layers
        hook.step_schedule = EVERY_STEP
    return hook


@cache
def bare(odd: Odd) -> Outcome:
    return Outcome.of(train_oddly(odd))


def refused(name: str, odd: Odd) -> bool:
    """Return whether a run refuses a hook; fail unless it does so with the expected message."""
    sentence = REFUSED.get((name, odd.update), "")
    if sentence:
        steps: list[int] = []
        loss = lambda model, batch: steps.append(1) or odd_loss(model, batch)
        with pytest.raises(UsageError, match=sentence.format(name=name)):
            train_oddly(odd, [make(name)], compute_loss=loss)
        assert steps == []
    return bool(sentence)


@pytest.mark.longer
@pytest.mark.some_rows(3)
@pytest.mark.guarantee("observers-change-nothing")
@every_hook_and_row(QUIET)
def test_hook_leaves_odd_run_unchanged_or_is_refused(name: str, odd: Odd) -> None:
    """A quiet hook reports metrics and leaves the final state of the bare run, unless the run refuses it by name."""
    if refused(name, odd):
        return
    run = train_oddly(odd, [make(name)], reference_weights=bare(odd).weights)
    assert run.sink.rows(name + "/") != []
    bare(odd).assert_same_as(Outcome.of(run))


def mutate_temporarily(run_ctx: Any, model_ctx: Any) -> None:
    model_ctx.take_step(run_ctx.batch_data)
    model_ctx.compute_batch_gradients(run_ctx.batch_data)


@pytest.mark.longer
@pytest.mark.guarantee("commits-are-declared")
@every_hook_and_row(COMMITTING)
def test_committing_hook_changes_only_declared_state(name: str, odd: Odd) -> None:
    """Another hook's temporary mutation before the commit does not change the outcome either."""
    if refused(name, odd):
        return
    run = train_oddly(odd, [make(name)], manager_class=WatchingManager)
    changed = {entry for entries in run.manager.changes.values() for entry in entries}
    allowed = tuple(prefix for part in HookRegistry.get(name).commits for prefix in PREFIXES[part])
    assert changed
    assert [entry for entry in changed if not entry.startswith(allowed)] == []
    acting = at(ActingHook, HookPoint.POST_BACKWARD, needs_pre_epoch_state=False)(mutate_temporarily)
    Outcome.of(run).assert_same_as(Outcome.of(train_oddly(odd, [acting, make(name)])))


def pass_forward(task: TrainingTask) -> None:
    with torch.random.fork_rng():
        odd_loss(task.model, next(iter(task.loader)))


def step_and_restore(task: TrainingTask) -> None:
    """Step the optimizer and the scheduler, and restore the weights."""
    saved = copied(dict(task.model.named_parameters()))
    for parameter in task.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    task.optimizer.step(*[lambda: torch.ones(())] * takes_closure(task.optimizer))
    advance_scheduler(task, 1)
    overwrite(dict(task.model.named_parameters()), saved)


def write(task: TrainingTask) -> None:
    for batch in task.loader:
        parts(batch)[0].zero_()


MUTATIONS = (
    [(Odd(place, "preconditioner", "tuple"), pass_forward) for place in PLACES]
    + [(Odd("tensor", update, "tuple"), step_and_restore) for update in UPDATES]
    + [(Odd("tensor", "timm", batch), write) for batch in BATCHES]
)


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize(
    ("odd", "mutation"), MUTATIONS, ids=[f"{mutation.__name__}-{odd}" for odd, mutation in MUTATIONS]
)
def test_mutation_of_odd_state_changes_the_outcome(odd: Odd, mutation: Any) -> None:
    """Each mutation changes the result of its run, so the contract tests would detect a hook that makes it."""

    class Meddling(WatchedManager):
        def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
            if point is HookPoint.PRE_STEP and self.state.loop.step == 2:
                mutation(self.task)
            call()

    listener = at(SpyHook, HookPoint.PRE_STEP)(lambda ctx: None)  # without a listener the point is not fired
    assert bare(odd).changed(Outcome.of(train_oddly(odd, [listener], manager_class=Meddling))) != []


@pytest.mark.guarantee("observers-change-nothing")
def test_default_rows_cover_every_pair_of_values() -> None:
    """The rows that are not marked slow cover every pair of values of two axes and every loop."""
    rows = [(name, *row) for name, chosen in CHOSEN.items() for row in chosen]
    for first, second in combinations(range(4), 2):
        axes = (tuple(CHOSEN), *AXES)
        assert {(row[first], row[second]) for row in rows} == {*product(axes[first], axes[second])}
    for name in CHOSEN:
        assert {odd(name, row).loop for row in CHOSEN[name]} == {loop for loop in LOOPS if fires(name, loop)}
