"""The gate for all user code: derived random streams, checks of read-only calls, rollback of interventions."""

import operator
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache, cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ..errors import StateMutationError, library_warnings_ignored
from ..preserved_streams import threads_of_script
from ..state import NODE_HOOKS, TrainingState
from ..state.generators import StreamState
from ..state.settings import DEFAULT_SETTINGS, MODE_COUNTERS, leave_modes, neutral_settings, script_settings
from .engine_callbacks import current_pass, with_callbacks
from .guardian import StateCopy
from .tripwire import Audit, Tripwire

Result = TypeVar("Result")
# Most mutations appear in the first calls. Later calls share one rest check at the end of the visit, except call
# numbers that are powers of two: that also finds late mutations that do not increment a tensor's version counter.
CALLS_CHECKED_ALONE = 3
VISITS = threading.RLock()
"""Held during a visit or a call in a pass, and while hooks on all modules or optimizers are registered or removed.

Trainings in several threads share the random generators, the settings and these hooks of the process.
"""


def is_in_visit() -> bool:
    """Return whether this thread runs hooks, so that what it does is none of the training."""
    return bool(VISITS._is_owned())  # type: ignore[attr-defined]


@cache
def is_shipped(kind: type) -> bool:
    """Return whether a class of hooks or sinks is one of loopscope's own."""
    return kind.__module__.startswith("loopscope.")


class Call(NamedTuple):
    """Name, place and step of a call: they identify it in errors and determine its random stream."""

    name: str
    where: str
    step: int
    kind: str = "Hook"
    is_shipped: bool = False
    """Whether the code is that of loopscope, which its contract tests prove to be neutral one by one."""
    draws: bool = True
    """Whether the code may draw random numbers, so that it needs a separate stream."""

    def __str__(self) -> str:
        """Return the subject of a sentence about this call."""
        return f"{self.kind} {self.name!r} at {self.where} of step {self.step}"


class AnyOf(list[Call]):
    """One of several calls, as the subject of a sentence that is composed only for an error."""

    def __str__(self) -> str:
        """Return the subjects of all calls."""
        return " or ".join(map(str, self))


class Isolation:
    """Keeps hooks, evaluation, checkpoints and sinks from changing the training state.

    A visit is the group of calls at one hook point, from :meth:`start_visit` to :meth:`end_visit`. Each call runs on a
    derived random stream, and the state is compared with the state after the previous call.

    The quick check makes a quick sweep. The rest check extends the latest quick sweep to a complete one, once for all
    calls since the previous rest check. The bytes check compares recorded digests. A full check is all three for one
    call; under audit, the audit replaces its bytes check.

    A quick check follows every call of other code. Consecutive calls of loopscope's own code share one quick check,
    except those with a full check or an error, and one bytes check; both are made at the end of the visit, or before
    the next call that is checked alone. With ``check_every_call`` no call shares a check.
    """

    def __init__(
        self,
        state: TrainingState,
        *,
        audit: bool = False,
        check_every_call: bool = False,
        guardian_device: torch.device | None = None,
    ) -> None:
        self._state = state
        self._check_every_call = check_every_call
        self.streams = state.streams
        self._tripwire = Tripwire(state)
        self._audit = Audit(state, enabled=audit)
        self._guardian = StateCopy(guardian_device, versions=True)
        self._saved_streams: StreamState | None = None
        self._derived_streams: StreamState | None = None
        """The streams after the newest call of :meth:`_derive_among_threads` in this visit."""
        self._derivations = 0
        self._has_threads = False
        """Whether other threads of the script run during the visit."""
        self._derive: Callable[[str, str, int], None] = self.streams.derive
        self._holds_lock = False
        self._is_saved = self._holds_copies = self._is_recording = False
        self._has_commit = False
        self._modes: tuple[int, ...] = (*map(operator.call, MODE_COUNTERS),)
        self._has_settings = False
        """Whether the script may have set the default dtype, the default device or autocast."""
        self._grad_mode = torch.is_grad_enabled()
        self._unchecked_calls: list[Call] = []
        """Calls that share the next quick check."""
        self._unfinished_calls: list[Call] = []
        """Calls since the previous rest check that had a quick check."""
        self._calls_sharing_bytes: list[Call] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._rewriting_calls: set[tuple[str, str]] = set()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model in this visit, in the model's order."""
        if not self._tripwire.quick:
            self._tripwire.take_baseline(is_complete=False)
        return self._tripwire.watch.parameters

    @property
    def run_streams(self) -> StreamState:
        """The state of the run's random generators: at the start of the current visit, or now outside of one."""
        return self._saved_streams or self.streams.save()

    def include(self, modules: Mapping[str, nn.Module]) -> None:
        """Protect other modules too, between two visits."""
        self._state.include(modules)
        self._tripwire = Tripwire(self._state)

    def start_visit(self) -> None:
        """Save the run's random streams; the first call that is checked takes the baseline."""
        VISITS.acquire()
        self._holds_lock = True
        # Counted first, since nearly always this thread is the only one.
        self._has_threads = threading.active_count() > 1 and bool(threads_of_script())
        self._derive = self._derive_among_threads if self._has_threads else self.streams.derive
        self._derived_streams = None
        self._saved_streams, self._derivations = self.streams.save(), self.streams.derivations
        self._is_saved = self._has_commit = False
        self._unchecked_calls, self._unfinished_calls, self._calls_sharing_bytes = [], [], []
        self._modes, self._grad_mode = (*map(operator.call, MODE_COUNTERS),), torch.is_grad_enabled()
        self._has_settings = [*map(operator.call, DEFAULT_SETTINGS)] != [*DEFAULT_SETTINGS.values()]
        if not self._is_recording:
            self._is_recording = True
            NODE_HOOKS.start()
        if self._audit.enabled:
            self.retake_baseline()

    def end_visit(self) -> None:
        """Make the pending rest check and restore the run's random streams, also after an error."""
        # Cleared first, so that the next visit starts from a clean state even if an error is raised below.
        saved, self._saved_streams = self._saved_streams, None
        if self._holds_copies:
            self._holds_copies = False
            self._guardian.release()
        try:
            if self._unchecked_calls or self._unfinished_calls or self._calls_sharing_bytes:
                self.finish_checks()
        finally:
            self._tripwire.release()
            if self._is_recording:
                self._is_recording = False
                NODE_HOOKS.stop()
            try:
                if saved is not None:
                    is_derived = self.streams.derivations != self._derivations
                    if self._has_threads and is_derived:
                        self.streams.report_threads(self._derived_streams)
                    if is_derived or not self._has_threads:  # otherwise only other threads can have drawn
                        saved.restore()
            finally:
                if self._holds_lock:
                    self._holds_lock = False
                    VISITS.release()

    def _derive_among_threads(self, name: str, where: str, step: int) -> None:
        """Derive a stream; the run's streams include what other threads have drawn until here."""
        if self._derived_streams is not None:
            self.streams.report_threads(self._derived_streams)
        elif self.streams.derivations == self._derivations:
            self._saved_streams = self.streams.save()
        self.streams.derive(name, where, step)
        self._derived_streams = self.streams.save()

    def retake_baseline(self) -> None:
        """Make the current state the baseline: after a commit, or after a rollback moved tensor versions.

        Does nothing outside of a visit, which has no baseline.
        """
        if self._saved_streams is None:
            return
        self._has_commit = False
        self._restore_streams_for_audit()
        self._tripwire.take_baseline()
        self._audit.take_baseline()

    def check(self, call: Call, *, shares_bytes: bool = False) -> None:
        """Raise :class:`StateMutationError` if the state visibly differs from the baseline.

        A call that ``shares_bytes`` leaves the comparison of bytes to :meth:`finish_checks`.
        """
        self._unchecked_calls.append(call)
        self._check_quickly()
        calls, self._unfinished_calls = self._unfinished_calls, []
        self._tripwire.check_rest(AnyOf(calls))
        if self._tripwire.rewritten:  # also by tensors that moved to other memory
            self._rewriting_calls.add(call[:2])
        if self._audit.enabled:
            self._restore_streams_for_audit()
            self._audit.check(call)
        elif shares_bytes:
            self._calls_sharing_bytes.append(call)
        else:
            self._tripwire.check_bytes(call)

    def finish_checks(self) -> None:
        """Make the checks of the calls that share them; an error names all of these calls."""
        if self._unchecked_calls:
            self._check_quickly()
        if self._unfinished_calls:
            calls, self._unfinished_calls = self._unfinished_calls, []
            self._tripwire.check_rest(AnyOf(calls))
        if self._calls_sharing_bytes:
            calls, self._calls_sharing_bytes = self._calls_sharing_bytes, []
            self._tripwire.check_bytes(AnyOf(calls))

    def observe(self, call: Call, function: Callable[[], Result]) -> Result:
        """Run ``function`` on the call's random stream, without gradient tracking, and check the state.

        The first calls of an observer, and every call under audit, get a full check; later calls get a quick one, and
        those of loopscope's own code share it.
        """
        if self._has_commit:
            self.retake_baseline()
        shares = call.is_shipped and not self._check_every_call
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self._grad_mode)  # the call around a nested one is without gradients
        if not shares and (self._calls_sharing_bytes or self._unchecked_calls):
            self.finish_checks()
        is_full = self._prepare_check(call, self._tripwire, shares=shares)
        shares_quick_check = shares and not is_full and call[:2] not in self._rewriting_calls
        if call.draws:
            self._derive(call.name, call.where, call.step)
        if self._has_settings:
            function = _with_settings_of(call, function)
        # torch.no_grad() as a context manager would cost each observer 1.5 µs.
        torch._C._set_grad_enabled(False)
        try:
            return function() if current_pass() == -1 else with_callbacks(function)
        except BaseException:
            shares_quick_check = False
            _restore_cheaply(self._tripwire, self._modes)
            raise
        finally:
            torch._C._set_grad_enabled(self._grad_mode)
            if (*map(operator.call, MODE_COUNTERS),) != self._modes:
                leave_modes(self._modes)
            if is_full:
                self.check(call, shares_bytes=shares)
            else:
                self._unchecked_calls.append(call)
                if not shares_quick_check:
                    self._check_quickly()
            if grad_mode is not self._grad_mode:  # a nested call: the outer one continues without gradients
                torch._C._set_grad_enabled(grad_mode)

    def observe_in_pass(self, call: Call, function: Callable[[], Result]) -> Result:
        """Run ``function`` during the run's forward or backward pass, on the call's random stream, and check the state.

        The baseline is taken immediately before, since the pass itself changes the state between such calls.
        """
        # A visit of this run may wait for a pass whose functions autograd calls in other threads.
        with nullcontext() if self._holds_lock else VISITS:
            NODE_HOOKS.start()
            try:
                return self._observe_from_here(call, function)
            finally:
                NODE_HOOKS.stop()

    def _observe_from_here(self, call: Call, function: Callable[[], Result]) -> Result:
        tripwire, audit = self._pass_checkers
        modes, grad_mode = (*map(operator.call, MODE_COUNTERS),), torch.is_grad_enabled()
        tripwire.take_baseline()
        # All taps of a hook share one count: full checks of the first calls at every target would cost too much.
        all_taps = call._replace(where="taps")
        is_full = self._prepare_check(all_taps, tripwire, in_pass=True)
        audit.take_baseline()
        try:
            with self.streams.preserved() if call.draws else nullcontext():
                if call.draws:
                    self.streams.derive(call.name, call.where, call.step)
                if [*map(operator.call, DEFAULT_SETTINGS)] != [*DEFAULT_SETTINGS.values()]:
                    function = _with_settings_of(call, function)
                try:
                    return with_callbacks(function)
                except BaseException:
                    _restore_cheaply(tripwire, modes)
                    raise
                finally:
                    torch._C._set_grad_enabled(grad_mode)
                    leave_modes(modes)
        finally:
            try:
                tripwire.check_quickly(call)
                if tripwire.rewritten:
                    self._rewriting_calls.add(all_taps[:2])
                tripwire.check_rest(call)
                audit.check(call)
                if is_full and not audit.enabled:
                    tripwire.check_bytes(call)
            finally:
                tripwire.release()

    @cached_property
    def _pass_checkers(self) -> tuple[Tripwire, Audit]:
        """Tripwire and audit for calls during a pass, separate from those of a visit, which may contain the pass."""
        state = self._state
        # Autograd has one thread per device: with several devices, gradients can arrive while a function runs.
        has_several_devices = len({parameter.device for parameter in state.modules.parameters()}) > 1
        parts = [part for part in state.parts if part.name != "gradients"] if has_several_devices else ()
        return Tripwire(state, parts), Audit(state, parts, enabled=self._audit.enabled)

    def _prepare_check(self, call: Call, tripwire: Tripwire, *, shares: bool = False, in_pass: bool = False) -> bool:
        """Count the call, return whether it gets a full check, and take the baseline and record the bytes for it.

        A call that ``shares`` its quick check gets a complete baseline only for a full check.

        Calls in a pass cannot share a bytes check. loopscope's own taps get none: the contract tests audit all of them.
        """
        if in_pass and call.is_shipped and not self._audit.enabled:
            return False
        key = call[:2]
        seen = self._calls[key] = self._calls.get(key, 0) + 1
        # seen & (seen - 1) is 0 exactly for powers of two
        is_full = seen <= CALLS_CHECKED_ALONE or not seen & (seen - 1) or self._audit.enabled
        needs_bytes = is_full or key in self._rewriting_calls
        if needs_bytes and self._unchecked_calls:  # first, since bytes that these calls changed must not be recorded
            self._check_quickly()
        is_complete = is_full or not shares
        if not tripwire.quick or (is_complete and not tripwire.rest):
            tripwire.take_baseline(is_complete=is_complete)
        if needs_bytes:
            tripwire.record_bytes()
        return is_full

    def _check_quickly(self) -> None:
        """Check the calls that share the next quick check."""
        calls, self._unchecked_calls = self._unchecked_calls, []
        try:
            self._tripwire.check_quickly(AnyOf(calls))
        except StateMutationError:
            # The end of the visit would blame these calls for the same change.
            self._unfinished_calls, self._calls_sharing_bytes = [], []
            raise
        if self._tripwire.rewritten:
            self._rewriting_calls.update([call[:2] for call in calls])
        self._unfinished_calls += calls

    def intervene(self, call: Call, function: Callable[[], Result], *, mutates: bool) -> Result:
        """Run ``function`` on the call's random stream and roll back all its changes of the training state."""
        self.finish_checks()
        if self._has_commit:
            self.retake_baseline()
        # One state copy serves all interventions of a visit, since each is rolled back; a commit invalidates it.
        if mutates and not self._is_saved:
            self._state.sharding.refuse_gathered()
            with library_warnings_ignored():
                self._guardian.save(self._state)
            self._is_saved = self._holds_copies = True
        if not mutates:
            self._prepare_check(call, self._tripwire)
        if call.draws:
            self._derive(call.name, call.where, call.step)
        if self._has_settings:
            function = _with_settings_of(call, function)
        try:
            return with_callbacks(function)
        except BaseException:
            if not mutates:
                _restore_cheaply(self._tripwire, self._modes)
            raise
        finally:
            leave_modes(self._modes)
            if mutates:
                self._roll_back(call)
                self._restore_streams_for_audit()
                self._audit.check(call)
                self._tripwire.take_baseline()
            else:
                self.check(call)

    def _roll_back(self, call: Call) -> None:
        try:
            with library_warnings_ignored():
                self._guardian.restore(self._state)
        except Exception as error:
            raise StateMutationError(
                f"The training state after {call} cannot be restored ({type(error).__name__}: {error}), so the run "
                "ends here and no checkpoint is written from this state."
            ) from error

    def note_commit(self) -> None:
        """Record that the state was changed intentionally: the next call of this visit starts from it."""
        self._is_saved = False
        self._has_commit = True

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Start a visit before the body and end it afterwards; within another visit, only run the body."""
        if self._saved_streams is not None:
            yield
            return
        try:
            self.start_visit()
            yield
            self.finish_checks()
        finally:
            self.end_visit()

    def _restore_streams_for_audit(self) -> None:
        if self._audit.enabled and self._saved_streams is not None:
            self._saved_streams.restore()


def _with_settings_of(call: Call, function: Callable[[], Result]) -> Callable[[], Result]:
    """Return a function that calls another in the settings of its code: the script's for code of the script."""

    def run() -> Result:
        with neutral_settings() if call.is_shipped else script_settings():
            return function()

    return run


def _restore_cheaply(tripwire: Tripwire, modes: tuple[int, ...]) -> None:
    """Undo what is cheap to undo after a call raised; if that restores the state, the call's own error is reported."""
    leave_modes(modes)  # first, since an entered mode could intercept the other operations
    with library_warnings_ignored():  # a warning raised as an error would leave the rollback incomplete
        tripwire.restore_cheaply()
