"""Misbehaving hooks on the simulated accelerator: what they change is reported or rolled back, as on the CPU."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from loopscope.errors import StateMutationError
from loopscope.hooks import HookPoint
from loopscope.isolation.tripwire import Audit

from tests.contracts.test_misbehaving_hooks import (
    CASE,
    MisbehavingIntervention,
    MisbehavingObserver,
    only_at,
    train_with,
)
from tests.fake_device.device import count_synchronisations, on_fake_device
from tests.support import Run, at, differences, train
from tests.support.cases import slow_unless
from tests.support.misbehaving_hooks import DETECTED_BY_TRIPWIRE, HARMLESS, MUTATIONS
from tests.support.spies import SpyHook

pytestmark = [pytest.mark.fake_device, pytest.mark.slow]
POSSIBLE = sorted(name for name in MUTATIONS if "numpy" not in name or "generator" in name)
"""All mutations but the writes through NumPy, which has no access to the memory of an accelerator."""
PARTS = 12
QUICK_PART = 0


def in_parts(test: Callable[..., None]) -> Callable[..., None]:
    """Parametrize over parts of the mutations, of which one is tested without ``slow``."""
    rows = [pytest.param(part, marks=slow_unless(part == QUICK_PART)) for part in range(PARTS)]
    return pytest.mark.parametrize("part", rows)(test)


@cache
def bare() -> Run:
    return train(CASE, audit=False, device="fake")


def differs(run: Run) -> str:
    """Return the first difference from the run without hooks, or an empty string."""
    if run.error is not None or len(run.digests) != len(bare().digests):
        return f"ended with {run.error!r}"
    pairs = zip([*bare().digests, bare().final], [*run.digests, run.final], strict=True)
    return ", ".join(name for pair in pairs for name in differences(*pair))


def missed(name: str, *, audit: bool) -> str:
    """Return why an observer that makes a mutation is neither harmless nor reported, or an empty string."""
    mutator = only_at(MisbehavingObserver, HookPoint.POST_STEP)([name])
    # A change that only the audit detects may end a later step with an error of torch.
    expected = StateMutationError if audit or name in DETECTED_BY_TRIPWIRE else Exception
    run = train_with(mutator, CASE, audit=audit, raises=expected, device="fake")
    if name in HARMLESS:
        return differs(run)
    error = str(run.error)
    if "Hook 'misbehaving' at POST_STEP of step 1 may only read, but changed" in error:
        return ""
    return error if audit or name in DETECTED_BY_TRIPWIRE else ""


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("audit", [False, True], ids=["tripwire", "audit"])
@in_parts
@on_fake_device
def test_observer_is_harmless_or_reported(part, audit):
    """On a simulated accelerator, with and without audit, the error names the hook and the change."""
    reasons = {name: missed(name, audit=audit) for name in POSSIBLE[part::PARTS]}
    failures = {name: reason for name, reason in reasons.items() if reason}
    assert not failures, failures


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("guardian", [None, "cpu"], ids=["device", "host"])
@in_parts
@on_fake_device
def test_intervention_is_rolled_back(part, guardian):
    """The copies of the state are on the device, or in host memory with ``--guardian-device cpu``."""
    device = None if guardian is None else torch.device(guardian)
    failures = {}
    for name in POSSIBLE[part::PARTS]:
        mutator = only_at(MisbehavingIntervention, HookPoint.POST_STEP, HookPoint.POST_EPOCH)([name])
        difference = differs(train_with(mutator, CASE, audit=False, device="fake", guardian_device=device))
        if difference or mutator.done != 4:
            failures[name] = difference or f"called {mutator.done} times"
    assert not failures, failures


WRITES = {
    "through .data": lambda model: next(model.parameters()).data.view(-1)[1:2].add_(1),
    "through an alias": lambda model: torch.empty(0, device="fake").set_(storage_of(model), 3, (2,), (1,)).fill_(4.0),
    "of one bit": lambda model: next(model.parameters()).data.view(torch.int32).view(-1)[-1:].bitwise_xor_(1),
}


def storage_of(model: torch.nn.Module) -> torch.UntypedStorage:
    return next(model.parameters()).untyped_storage()


@pytest.mark.guarantee("observers-change-nothing")
@on_fake_device
def test_write_without_version_is_reported_in_first_calls():
    """The bytes are compared by digests that the device computes (docs/decisions/0035)."""
    for name, write in WRITES.items():
        hook = at(SpyHook, HookPoint.POST_STEP)(lambda ctx, write=write: write(ctx.model) and {})
        run = train(CASE, [hook], audit=False, raises=StateMutationError, device="fake")
        assert "changed the training state: parameters/0.weight" in str(run.error), name


@on_fake_device
def test_comparing_bytes_copies_one_result_to_the_host():
    """No state is copied: a check of one call transfers which tensors differ, all together."""
    run = train(CASE, audit=False, device="fake")
    tripwire = run.manager.isolation._tripwire
    tripwire.take_baseline()
    tripwire.record_bytes()  # the first one transfers the constants of the formula
    tripwire.take_baseline()
    with count_synchronisations() as recording:
        tripwire.record_bytes()
    with count_synchronisations() as checking:
        tripwire.check_bytes("the test")
    assert (recording.by_kind, checking.by_kind) == ({}, {"copies to the host": 1})


@on_fake_device
def test_audit_copies_one_result_to_the_host():
    """The digest of each entry of the state on the device is computed there."""
    audit = Audit(train(CASE, audit=False, device="fake").state, enabled=True)
    audit.take_baseline()  # the first one transfers the constants of the formula
    with count_synchronisations() as recording:
        audit.take_baseline()
    with count_synchronisations() as checking:
        audit.check("the test")
    assert (recording.by_kind, checking.by_kind) == ({}, {"copies to the host": 1})
