"""One gate for all foreign code: its own random streams, watched while it reads, rolled back when it intervenes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import cached_property
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from ..errors import StateMutationError, library_warnings_ignored
from ..state import StreamState, TrainingState, entered_modes, leave_modes
from .guardian import Snapshot
from .tripwire import Audit, Tripwire

Result = TypeVar("Result")
# Most faults show in the first calls; later ones share one complete check at the end of the visit, but for those at
# which the count has doubled: what begins late, and behind torch's back, is found there.
CALLS_CHECKED_ALONE = 3


class Call(NamedTuple):
    """Who is called, where and when: names a culprit, and its random stream."""

    name: str
    where: str
    step: int
    kind: str = "Hook"

    def __str__(self) -> str:
        """Return the words that begin a sentence about this call."""
        return f"{self.kind} {self.name!r} at {self.where} of step {self.step}"


class Isolation:
    """Keeps hooks, evaluation, checkpoints and sinks from changing the training state.

    A visit begins with :meth:`begin` and ends with :meth:`end`; in between, any number of calls are made on
    derived streams, each of them checked against the one before.
    """

    def __init__(
        self, state: TrainingState, *, audit: bool = False, guardian_device: torch.device | None = None
    ) -> None:
        self._state = state
        self._streams = state.streams
        self._tripwire = Tripwire(state)
        self._audit = Audit(state, enabled=audit)
        self._guardian = Snapshot(guardian_device)
        self._saved_streams: StreamState | None = None
        self._is_saved = False
        self._has_commit = False
        self._modes, self._grad_mode = entered_modes(), torch.is_grad_enabled()
        self._unfinished_calls: list[Call] = []
        self._calls: dict[tuple[str, str], int] = {}
        self._rewriting_calls: set[tuple[str, str]] = set()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the model at the beginning of the visit, in its order."""
        return self._tripwire.watch.parameters

    @property
    def run_streams(self) -> StreamState:
        """The state of the run's generators: of now, or during a visit of its beginning."""
        return self._saved_streams or self._streams.save()

    def start_visit(self) -> None:
        """Save the run's streams and take the baseline of every check."""
        self._saved_streams = self._streams.save()
        self._is_saved = self._has_commit = False
        self._unfinished_calls = []
        self._modes, self._grad_mode = entered_modes(), torch.is_grad_enabled()
        if self._audit.enabled:
            self.rebase()
        else:
            self._tripwire.take_baseline()

    def end_visit(self) -> None:
        """Settle what was checked quickly, also when something was raised, and put the run's streams back."""
        # Cleared first, so that the next visit begins anew whatever is raised below.
        saved, self._saved_streams = self._saved_streams, None
        self._guardian.release()
        try:
            self.complete_checks()
        finally:
            self._tripwire.release()
            if saved is not None:
                saved.restore()

    def rebase(self) -> None:
        """Accept the present state as the baseline: after a commit, or after a rollback moved the versions.

        Outside of a visit there is none to renew.
        """
        if self._saved_streams is None:
            return
        self._restore_streams_for_audit()
        self._tripwire.take_baseline()
        self._audit.take_baseline()

    def check(self, call: Call) -> None:
        """Raise :class:`StateMutationError` if the state differs from the baseline in anything that can be seen."""
        self._check_quickly(call)
        self.complete_checks()
        if self._audit.enabled:
            self._restore_streams_for_audit()
            self._audit.check(call)
        else:
            self._tripwire.check_bytes(call)

    def complete_checks(self) -> None:
        """Complete the check of all calls that had a quick one only; an error then names all of them."""
        if self._unfinished_calls:
            calls, self._unfinished_calls = self._unfinished_calls, []
            self._tripwire.check_rest(" or ".join(map(str, calls)) if len(calls) > 1 else calls[0])

    def observe(self, call: Call, function: Callable[[], Result]) -> Result:
        """Run ``function`` on the call's own random stream, without gradient tracking, and check.

        The first calls of an observer, and every call under audit, are checked completely, the later ones quickly.
        """
        if self._has_commit:
            self._rebase_after_commit()
        is_full = self._needs_full_check(call, self._tripwire)
        self._streams.derive(call.name, call.where, call.step)
        # torch.no_grad() as a context manager takes 1.5 µs, which ten observers pay ten times
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function()
        except BaseException:
            _restore_cheaply(self._tripwire, self._modes)
            raise
        finally:
            torch._C._set_grad_enabled(self._grad_mode)
            leave_modes(self._modes)
            if is_full:
                self.check(call)
            else:
                self._check_quickly(call)
            if grad_mode is not self._grad_mode:  # this was a call within a call, which goes on without gradients
                torch._C._set_grad_enabled(grad_mode)

    def observe_in_pass(self, call: Call, function: Callable[[], Result]) -> Result:
        """Run ``function`` amid the run's own forward or backward pass, on the call's own random stream, and check.

        The baseline is taken right before, since a pass changes the state on purpose from one such call to the next.
        """
        tripwire, audit = self._pass_checkers
        modes, grad_mode = entered_modes(), torch.is_grad_enabled()
        tripwire.take_baseline()
        # one count for all taps of a hook: at each of many targets the first calls would cost too much
        all_taps = call._replace(where="taps")
        is_full = self._needs_full_check(all_taps, tripwire)
        audit.take_baseline()
        try:
            with self._streams.isolated():
                self._streams.derive(call.name, call.where, call.step)
                try:
                    return function()
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
        """What watches calls amid a pass, apart from what watches a visit, in which such a pass may be under way."""
        state = copy(self._state)
        # Autograd has a thread for every device: with several, gradients arrive while a function is called in another.
        if len({parameter.device for parameter in state.model.parameters()}) > 1:
            state.parts = [part for part in state.parts if part.name != "gradients"]
        return Tripwire(state), Audit(state, enabled=self._audit.enabled)

    def _needs_full_check(self, call: Call, tripwire: Tripwire) -> bool:
        """Return whether this call is checked alone; note bytes for these, and where they were rewritten before."""
        key = call[:2]
        seen = self._calls[key] = self._calls.get(key, 0) + 1
        is_full = seen <= CALLS_CHECKED_ALONE or not seen & (seen - 1) or self._audit.enabled
        if is_full or key in self._rewriting_calls:
            tripwire.remember(everywhere=self._audit.enabled)
        return is_full

    def _check_quickly(self, call: Call) -> None:
        self._tripwire.check_quickly(call)
        if self._tripwire.rewritten:
            self._rewriting_calls.add(call[:2])
        self._unfinished_calls.append(call)

    def intervene(self, call: Call, function: Callable[[], Result], *, mutates: bool) -> Result:
        """Run ``function`` on the call's own random stream and roll back whatever it did to the training state."""
        self.complete_checks()
        if self._has_commit:
            self._rebase_after_commit()
        # One copy serves all interventions of a visit, since each ends where it began; a commit makes it stale.
        if mutates and not self._is_saved:
            self._state.sharding.refuse_gathered()
            with library_warnings_ignored():
                self._guardian.save(self._state)
            self._is_saved = True
        if not mutates:
            self._needs_full_check(call, self._tripwire)
        self._streams.derive(call.name, call.where, call.step)
        try:
            return function()
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
                f"{call} left the training state so that it cannot be put back ({type(error).__name__}: {error}), so "
                "the run ends here and no checkpoint is written from this state."
            ) from error

    def committed(self) -> None:
        """Note that the state was changed on purpose: the next call of this visit starts from it."""
        self._is_saved = False
        self._has_commit = True

    def _rebase_after_commit(self) -> None:
        self._has_commit = False
        self.rebase()

    @contextmanager
    def visit(self) -> Iterator[None]:
        """Begin before the body and end after it, unless a visit is under way already."""
        if self._saved_streams is not None:
            yield
            return
        try:
            self.start_visit()
            yield
            self.complete_checks()
        finally:
            self.end_visit()

    def _restore_streams_for_audit(self) -> None:
        if self._audit.enabled and self._saved_streams is not None:
            self._saved_streams.restore()


def _restore_cheaply(tripwire: Tripwire, modes: tuple[int, int]) -> None:
    """Undo what can be undone of a call that raised, so that its own error is what is told where that suffices."""
    leave_modes(modes)  # first, since one that is still entered could answer the rest
    with library_warnings_ignored():  # one of them would leave something half undone
        tripwire.restore_cheaply()
