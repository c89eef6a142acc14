"""Functions that a hook leaves for Python to call later: observers are named, interventions are undone."""

import gc
import pdb
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import loopscope
import pytest
import torch
from loopscope import HookPoint, InterventionHook, TrainingHook
from loopscope.errors import StateMutationError
from torch import nn

SIGNALS = {"alarm": (signal.SIGALRM, signal.ITIMER_REAL), "virtual": (signal.SIGVTALRM, signal.ITIMER_VIRTUAL)}
SIGNALS["profiling"] = (signal.SIGPROF, signal.ITIMER_PROF)
Change = Callable[[nn.Parameter], Any]


def profile(weight: nn.Parameter) -> None:
    sys.setprofile(lambda frame, event, argument: weight.data.mul_(1.5) if frame.f_code.co_name == "backward" else None)


def trace(weight: nn.Parameter) -> None:
    sys.settrace(lambda frame, event, argument: weight.data.mul_(1.5) if frame.f_code.co_name == "backward" else None)


def collect(weight: nn.Parameter) -> None:
    gc.callbacks.append(lambda phase, information: weight.data.mul_(1.5))


def remove_callbacks(weight: nn.Parameter) -> None:
    gc.callbacks.clear()


def handler_of(name: str) -> Change:
    def leave(weight: nn.Parameter) -> None:
        number, timer = SIGNALS[name]
        signal.signal(number, lambda *_: weight.data.mul_(1.5))
        signal.setitimer(timer, 60)

    return leave


CHANGES: dict[str, Change] = {"profile": profile, "trace": trace, "collect": collect, "remove": remove_callbacks}
CHANGES |= {name: handler_of(name) for name in SIGNALS}


class Observer(TrainingHook):
    """Makes a change in its n-th call."""

    name = "deferring"
    hook_points = {HookPoint.POST_STEP}

    def __init__(self, change: Change, call: int = 1) -> None:
        self.change, self.call = change, call

    def act(self, ctx: Any) -> dict[str, float]:
        self.call -= 1
        if self.call == 0:
            self.change(ctx.model[0].weight)
        return {}

    def compute(self, ctx: Any) -> dict[str, float]:
        return self.act(ctx)

    def describe_metrics(self) -> list[Any]:
        return []


class Intervention(InterventionHook):
    """The same, rolled back."""

    name = "deferring"
    hook_points = {HookPoint.POST_STEP}
    __init__, act, describe_metrics = Observer.__init__, Observer.act, Observer.describe_metrics

    def intervene(self, run_ctx: Any, model_ctx: Any) -> dict[str, float]:
        return self.act(run_ctx)


def installed() -> tuple[Any, ...]:
    handlers = [signal.getsignal(number) for number, _ in SIGNALS.values()]
    return sys.getprofile(), sys.gettrace(), [*gc.callbacks], handlers


@contextmanager
def restored() -> Iterator[None]:
    """Restore the functions after the body."""
    profiler, tracer, callbacks, handlers = installed()
    gc.callbacks.append(print_nothing)
    try:
        yield
    finally:
        sys.setprofile(profiler)
        sys.settrace(tracer)
        gc.callbacks[:] = callbacks
        for (number, timer), handler in zip(SIGNALS.values(), handlers, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def print_nothing(phase: str, information: Any) -> None:
    pass


def trained(hook: TrainingHook | None, tmp_path: Any, **options: Any) -> torch.Tensor:
    """Train six steps with the hook, and return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [*torch.randn(6, 4, 3)]
    hooks = [] if hook is None else [hook]
    with loopscope.attach(
        model, optimizer, hooks=hooks, out=tmp_path / "run", overwrite=True, display="none", **options
    ) as scope:
        for batch in scope.batches(batches):
            scope.backward(model(batch).square().mean())
            gc.collect(0)
            optimizer.step()
            optimizer.zero_grad()
    return model[0].weight.detach().clone()


@pytest.mark.guarantee("observers-change-nothing")
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("call", [1, 2, 4])
def test_deferred_call_of_observer_is_named(tmp_path, name, call):
    """The error names the hook, the point and what was left, without an audit."""
    with restored(), pytest.raises(StateMutationError, match="'deferring' at POST_STEP of step") as caught:
        trained(Observer(CHANGES[name], call), tmp_path)
    labels = {"profile": "sys.setprofile", "trace": "sys.settrace", "collect": "gc.callbacks", "remove": "gc.callbacks"}
    expected = labels.get(name) or f"handler of {SIGNALS[name][0].name}"
    assert expected in str(caught.value)


@pytest.mark.guarantee("interventions-are-undone")
@pytest.mark.parametrize("name", CHANGES)
def test_deferred_call_of_intervention_is_undone(tmp_path, name):
    """What the intervention left is removed, and the run is that without hooks."""
    bare = trained(None, tmp_path)
    with restored():
        previous = installed()
        assert trained(Intervention(CHANGES[name], 2), tmp_path).equal(bare)
        assert installed() == previous


def raise_after(change: Change) -> Change:
    def leave(weight: nn.Parameter) -> None:
        change(weight)
        raise ValueError("as requested")

    return leave


@pytest.mark.parametrize("name", CHANGES)
def test_deferred_call_of_failed_observer_is_undone(tmp_path, name):
    """An observer that raises after its change is skipped, and the run is that without hooks."""
    bare = trained(None, tmp_path)
    with restored():
        previous = installed()
        hook = Observer(raise_after(CHANGES[name]), 2)
        with pytest.warns(UserWarning, match="as requested"):
            weights = trained(hook, tmp_path, on_hook_error="skip")
        assert weights.equal(bare)
        assert installed() == previous


def use_and_remove(weight: nn.Parameter) -> None:
    profiler, handler = sys.getprofile(), signal.getsignal(signal.SIGALRM)
    profile(weight)
    sys.setprofile(profiler)
    signal.signal(signal.SIGALRM, print_nothing)
    signal.signal(signal.SIGALRM, handler)


def start_debugger(weight: nn.Parameter) -> None:
    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    debugger.stopframe = object()  # stops in no frame
    sys.settrace(debugger.trace_dispatch)


HARMLESS = {"used and removed": use_and_remove, "debugger": start_debugger}


@pytest.mark.longer
@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_use_is_no_mutation(tmp_path, name):
    """A profiler or a handler of one call, and a debugger, change nothing."""
    bare = trained(None, tmp_path)
    with restored():
        assert trained(Observer(HARMLESS[name], 2), tmp_path).equal(bare)


def test_script_may_change_functions_between_steps(tmp_path):
    """Profilers and handlers of the script itself are not the hooks' changes."""
    with restored():
        sys.setprofile(print_nothing_of_frames)
        signal.signal(signal.SIGALRM, lambda *_: None)
        thread = threading.Thread(target=trained, args=(Observer(lambda _: None), tmp_path))
        thread.start()
        thread.join()
        assert sys.getprofile() is print_nothing_of_frames


def print_nothing_of_frames(frame: Any, event: str, argument: Any) -> None:
    pass
