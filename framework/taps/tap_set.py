"""The taps of a run: attached to the model, disabled in passes of hooks, removed at the end."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from torch import nn

from ..hooks import Tap, TapOwner
from ..state import InternalFunction, Traces, has_compiled_code
from ..training import eagerly, is_compiled
from .attached_tap import ATTACHED, DETACHED, AttachedTap, TapState
from .passes import Pass, RunningPasses


class TapSet:
    """The taps of a run, in the order of their hooks, and the passes that are running now."""

    def __init__(self, model: nn.Module, *, audit: bool = False, compiled: bool = False) -> None:
        """Create an empty set; ``audit`` compares every byte of a gradient before and after each tap.

        ``compiled`` is set if the model is part of a compiled module that is trained.
        """
        self._model = model
        self._audit = audit
        self._compiled = compiled or is_compiled(model)
        self._taps: dict[TapOwner, list[AttachedTap]] = {}
        self._passes = RunningPasses()
        self._traces = Traces.count
        self._call_watch = ExitStack()
        self._awaits_call = False
        """Whether compiled code existed before the step, and neither the model nor a tap was called since."""
        self.is_idle = not self._compiled
        """Whether :meth:`disabled` has no effect: no tap was attached, and the model is not compiled."""

    def attach(self, owner: TapOwner, taps: Iterable[Tap]) -> None:
        """Attach a hook's taps.

        Raises:
            UsageError: a tap cannot be attached; all taps are then removed from the model.
        """
        try:
            for declared in taps:
                self.is_idle = False
                tap = AttachedTap(
                    owner, declared, self._model, self._passes, compiled=self._compiled, audit=self._audit
                )
                self._taps.setdefault(owner, []).append(tap)
                if tap.state is not TapState.SEPARATE:
                    tap.attach()
        except BaseException:
            self.remove()
            raise

    def arrange(self) -> None:
        """Attach taps to modules for steps on which they are due, and detach them otherwise; called before each step.

        PyTorch calls modules without hooks faster.
        """
        self._traces = Traces.count
        for owner, taps in self._taps.items():
            # is_due() is called once per hook: a hook may tap every module of a model.
            outdated = DETACHED if owner.is_due() else ATTACHED
            for tap in taps:
                if tap.state is outdated:
                    tap.switch()
        self._call_watch.close()
        if not self._compiled and not self._passes.have_called_taps and has_compiled_code():
            self._awaits_call = True
            handle = self._model.register_forward_pre_hook(InternalFunction(self._note_call))
            self._call_watch.callback(handle.remove)

    def _note_call(self, module: nn.Module, inputs: object) -> None:
        if self._passes.kinds[-1] is Pass.OWN:
            self._awaits_call = False

    def disabled(self) -> AbstractContextManager[None]:
        """Disable all taps in the body, for passes that are not the run's own.

        Compiled modules run eagerly there: compiling them for other shapes or modes may change the run's results.
        """
        return self._eager_pass() if self._compiled else self._passes

    @contextmanager
    def _eager_pass(self) -> Iterator[None]:
        with self._passes, eagerly():
            yield

    def untapped_pass(self) -> AbstractContextManager[None]:
        """Disable all taps in the body, an additional pass of the run, which stays compiled if the model is."""
        return self._passes

    @property
    def is_bypassed(self) -> bool:
        """Whether the step that has just run called modules in a compiled function, where their taps do nothing.

        Such a function calls the model, as in ``torch.compile(loss_of)``, so the model does not show that it is
        compiled. The compiler has traced taps, or has compiled the function before the step, which then called neither
        taps nor the model. Without compiled code, modules whose taps are not called are just not called.
        """
        self._call_watch.close()
        if self._compiled or not any(self._attached_taps()):
            return False
        return Traces.count != self._traces or (self._awaits_call and not self._passes.have_called_taps)

    def _attached_taps(self) -> Iterator[AttachedTap]:
        return (tap for taps in self._taps.values() for tap in taps if tap.state is TapState.ATTACHED)

    def separate(self) -> set[str]:
        """Call taps in separate passes from now on, as in a compiled model; return the hooks for which that fails."""
        self._compiled = True
        taps = [tap for taps in self._taps.values() for tap in taps if tap.state is not TapState.PERMANENT]
        for tap in taps:
            tap.separate()
        return {tap.owner.hook for tap in taps if tap.replaces}

    @property
    def hooks(self) -> set[str]:
        """Names of the hooks with taps."""
        return {owner.hook for owner, taps in self._taps.items() if taps}

    @property
    def hooks_with_separate_pass(self) -> set[str]:
        """Names of the hooks with a tap that does not work in a compiled pass."""
        return {tap.owner.hook for tap in self._separate_taps()}

    @property
    def needs_separate_pass(self) -> bool:
        """Whether a tap is due now that does not work in a compiled pass."""
        if not self._compiled:
            return False
        due_taps = [taps for owner, taps in self._taps.items() if owner.is_due()]
        return any(tap.state is TapState.SEPARATE for taps in due_taps for tap in taps)

    def run_separate_pass(self, compute_gradients: Callable[[], object]) -> None:
        """Run an eager pass for exactly those taps that do not work in a compiled pass."""
        with ExitStack() as stack:
            stack.enter_context(self._passes.separate())
            stack.enter_context(eagerly())
            for tap in self._separate_taps():
                stack.callback(tap.detach)
                tap.attach()
            compute_gradients()

    def _separate_taps(self) -> list[AttachedTap]:
        return [tap for taps in self._taps.values() for tap in taps if tap.state is TapState.SEPARATE]

    def remove(self) -> None:
        """Remove all taps from the model, the last one first, also if the removal of one raises."""
        with ExitStack() as stack:
            stack.callback(self._taps.clear)
            stack.callback(self._call_watch.close)
            for taps in self._taps.values():
                for tap in taps:
                    stack.callback(tap.detach)
