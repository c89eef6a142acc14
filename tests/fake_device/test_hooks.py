"""Every shipped hook on the simulated accelerator: neutral, with the CPU's numbers, and with few synchronisations."""

from collections.abc import Callable, Sequence
from functools import cache
from math import isclose, isnan
from typing import Any

import pytest
import torch
from loopscope.errors import UsageError
from loopscope.hooks import HookPoint, StepSchedule, TrainingHook
from loopscope.isolation.tripwire import Tripwire
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from tests.contracts.test_hooks import COMMITTING, HEALTH, QUIET, fires, make
from tests.fake_device.device import Synchronisations, count_synchronisations, on_fake_device
from tests.support import Case, Run, SpyHook, WatchedManager, at, build, differences, train
from tests.support.cases import slow_unless
from tests.support.models import STEPS_PER_EPOCH

pytestmark = [pytest.mark.fake_device, pytest.mark.slow, pytest.mark.filterwarnings(f"ignore:{HEALTH}")]
STEPS = 9
CASES = [
    Case("transformer", "sgd_momentum", "step"),
    Case("tied", "adamw_fused", "epoch"),
    Case("batchnorm_mlp", "adamw_foreach", "epoch"),
]
"""One case per model."""
ALL = QUIET + COMMITTING
SAME_ATTENTION = SDPBackend.MATH
"""The implementation of attention on the device. With it, training on the CPU has the same bytes."""
MEASURED = {"train_loss": 1.0, "val_loss": 1.0, "train_acc": 0.5, "val_acc": 0.5}
SIZE = 8
GROUPS = [tuple(ALL[start : start + SIZE]) for start in range(0, len(ALL), SIZE)]


def every_case_and_group(quick: Sequence[Case] = CASES[:1]) -> pytest.MarkDecorator:
    """Parametrize over cases and groups of hooks, with one process each; ``slow`` outside of ``quick``."""
    rows = [
        pytest.param(case, names, id=f"{case}-{names[0]}", marks=slow_unless(case in quick))
        for case in CASES
        for names in GROUPS
    ]
    return pytest.mark.parametrize(("case", "names"), rows)


def reseed(task: Any, state: Any) -> None:
    """Seed all generators after the model was created, since only the CPU's has drawn its weights."""
    torch.manual_seed(11)


@cache
def reference(case: Case, device: str) -> dict[str, torch.Tensor]:
    """Return weights that training on the CPU has found, for hooks that compare with them."""
    with sdpa_kernel(SAME_ATTENTION):
        model = train(case, audit=False, every_step=False).task.model
    return {name: parameter.detach().clone().to(device) for name, parameter in model.named_parameters()}


def run(case: Case, name: str, device: str, **options: Any) -> Run:
    """Train with a hook, or without any; ``error`` is set if it refuses the model or the loop."""
    hooks = [quiet(make(name))] if name else []
    settings: dict[str, Any] = {"audit": False, "introduce": reseed, "raises": (UsageError,)}
    with sdpa_kernel(SAME_ATTENTION):
        return train(case, hooks, device=device, reference_weights=reference(case, device), **(settings | options))


def quiet(hook: TrainingHook) -> TrainingHook:
    """Leave out the evaluation of a hook, which is user code and may wait any number of times."""
    if hook.name == "weight_average":
        hook.evaluate = False
    return hook


@cache
def bare(case: Case) -> Run:
    return run(case, "", "fake")


def departure(case: Case, name: str) -> str:
    """Return in which way a hook's run on the device differs from those without it and on the CPU, or nothing."""
    here, there = run(case, name, "cpu"), run(case, name, "fake")
    if here.error or there.error:
        return (
            "" if str(here.error) == str(there.error) else f"{here.error!r} on the CPU, {there.error!r} on the device"
        )
    digests = zip(bare(case).digests, there.digests, strict=True)
    changed = [entry for pair in digests for entry in differences(*pair)]
    if changed and name in QUIET:
        return f"changed {changed[:3]}"
    expected = [row for row in here.sink.rows(f"{name}/") if row[0] not in ON_HOST_ONLY]
    return unequal_numbers(expected, there.sink.rows(f"{name}/"))


def unequal_numbers(expected: list[Any], measured: list[Any]) -> str:
    """Return the first number that differs by more than rounding."""
    if sorted(row[:3] for row in expected) != sorted(row[:3] for row in measured):
        return f"{len(expected)} numbers on the CPU, {len(measured)} on the device"
    for first, second in zip(expected, measured, strict=True):
        pairs = zip(tree_leaves(first[3]), tree_leaves(second[3]), strict=True)
        if not all(are_equal(*pair) for pair in pairs):
            return f"{first} on the CPU, {second[3]} on the device"
    return ""


ON_HOST_ONLY = {
    f"training_checks/{name}"
    for name in (
        *("input_mean", "input_std", "input_max_abs", "target_class_count", "target_top", "target_top_fraction"),
        *("ignored_target_fraction", "padding_fraction", "repeated_row_fraction", "duplicate_row_fraction"),
        "single_class_batch_fraction",
    )
}
"""Metrics of the data, which their hook computes only from tensors on the CPU, as its page states."""


def are_equal(first: float, second: float) -> bool:
    if isnan(first) or isnan(second):
        return isnan(first) and isnan(second)
    return isclose(first, second, rel_tol=1e-4, abs_tol=1e-6)


@pytest.mark.guarantee("observers-change-nothing")
@every_case_and_group()
@on_fake_device
def test_hook_is_neutral_with_numbers_of_cpu(case, names):
    """On a simulated accelerator, a run with a hook has the bytes of the run without it, and the CPU's metrics."""
    departures = {name: departure(case, name) for name in names}
    failures = {name: text for name, text in departures.items() if text}
    assert not failures, failures


def test_every_hook_runs_on_the_device():
    """Each hook is called in a loop of the cases."""
    assert all(any(fires(name, case.loop) for case in CASES) for name in ALL)
    assert {name for names in GROUPS for name in names} == {*ALL}


# Synchronisations


class CountingManager(WatchedManager):
    """A manager that counts the synchronisations of each visit with listeners, and of all others."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.counts: list[Synchronisations] = []
        self.without_listeners = 0

    def watch_call(self, point: HookPoint, call: Callable[[], None]) -> None:
        with count_synchronisations() as count:
            call()
        self.counts.append(count)

    def fire(self, point: HookPoint) -> None:
        if self.hooks.listeners.at[point]:
            super().fire(point)
            return
        with count_synchronisations() as count:
            super().fire(point)
        self.without_listeners += count.total


def counted(case: Case, hook: TrainingHook | None, steps: int = STEPS) -> CountingManager | None:
    """Train with a hook and return the manager; ``None`` if the hook refuses the case."""
    trained = train(
        case,
        [hook] if hook else [],
        steps=steps,
        audit=False,
        device="fake",
        every_step=False,
        raises=(UsageError,),
        reference_weights=reference(case, "fake"),
        manager_class=CountingManager,
        evaluate=lambda model: dict(MEASURED),
    )
    return None if trained.error else trained.manager


LIMITS = {
    # Passes on other batches: the order of each epoch is copied to the device, and results decide what follows.
    "counterfactual": 28,
    "counterfactual_validator": 99,
    "hessian": 77,
    "hypothesis_test": 9,
    "lr_probe": 5,
    "sharpness": 89,
    "step_history": 3,
    "what_if": 61,
    # Eigenvalues and singular values, for which CUDA waits: once per shape of matrices
    "batch_dynamics": 2,
    "matrix_updates": 4,
    "subspace_gradient_info": 2,
    "weight_tracking": 3,
    # Indices and factors that the host computes
    "attention": 9,
    "fourier": 3,
    "qk_clip": 3,
    # Zero gradients decide which metrics there are, and the first three checks are delivered at once.
    "training_checks": 2,
    # The first call copies tables or empty sums to the device; later ones synchronise once at most.
    "gradient_noise_scale": 2,
    "path_length": 3,
    "training_diagnostics": 2,
    "weight_updates": 2,
}
"""The largest number of synchronisations in one visit, for the hooks with more than one; 1 for all others.

One is the transfer of the metrics, at points of epochs, or of a decision of the hook. The numbers are exact: lower one
when a hook needs fewer.
"""


def largest_counts(case: Case, names: Sequence[str]) -> dict[str, int]:
    """Return the largest number of synchronisations in a visit of each hook that accepts a case.

    The comparison of the bytes in the first calls, which the hooks of a visit share, is left out: it is one more
    (``test_comparing_bytes_copies_one_result_to_the_host``).
    """
    Tripwire.record_bytes = lambda self: None  # in this process only
    managers = {name: counted(case, quiet(make(name))) for name in names}
    return {
        name: max((count.total for count in manager.counts), default=0)
        for name, manager in managers.items()
        if manager is not None
    }


@every_case_and_group(quick=CASES[1:2])
@on_fake_device
def test_visit_synchronises_at_most_so_often(case, names):
    exceeded = {name: count for name, count in largest_counts(case, names).items() if count > LIMITS.get(name, 1)}
    assert not exceeded, exceeded


@pytest.mark.slow
@pytest.mark.parametrize("names", GROUPS, ids=lambda names: names[0])
@on_fake_device
def test_limits_of_synchronisations_are_exact(names):
    counts = [largest_counts(case, names) for case in CASES]
    largest = {name: max(count.get(name, 0) for count in counts) for name in names}
    assert {name: count for name, count in largest.items() if count > 1} == {
        name: limit for name, limit in LIMITS.items() if name in names
    }


@on_fake_device
def test_steps_without_due_hooks_do_not_synchronise():
    """A hook that is due at the first step only costs no synchronisation at the others."""
    hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx: {"value": float(next(ctx.model.parameters()).sum())})
    hook.step_schedule = StepSchedule(mode="stride", every_n_steps=100)
    manager = counted(CASES[0], hook)
    assert manager is not None
    assert [count.total for count in manager.counts] == [2] + [0] * (STEPS - 1)  # the number, and the check of bytes
    assert manager.without_listeners == 0


@on_fake_device
def test_loop_without_hooks_does_not_synchronise_in_dispatches():
    for case in CASES:
        manager = counted(case, None)
        assert manager is not None
        assert manager.without_listeners == 0


@on_fake_device
def test_batches_copy_the_order_once():
    """Gathering the rows of a batch copies nothing to the device."""
    task, _ = build(CASES[0], device="fake")
    with count_synchronisations() as count:
        batches = list(task.loader.batches(0))
    assert len(batches) == STEPS_PER_EPOCH
    assert count.by_kind == {"copies to the device": 1}


@on_fake_device
def test_reading_two_numbers_synchronises_twice():
    """The counter detects a hook that reads its numbers one by one."""

    def reads(ctx: Any) -> dict[str, float]:
        first, second, *_ = ctx.model.parameters()
        return {"value": float(first.sum()) + float(second.sum())}

    manager = counted(CASES[0], at(SpyHook, HookPoint.POST_STEP)(reads))
    assert manager is not None
    assert manager.counts[4].total == 2
