"""Scopes: the calls by which a custom loop reports its batches, backward passes, evaluations and epochs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from ..checkpoints import allocate_saved, flatten_state
from ..combined_optimizers import separate_optimizers
from ..data import Loader
from ..doctor import Diagnosis, StepTimes, diagnosis_with
from ..errors import HookMisuseError, UsageError, notice, require
from ..hooks import HookPoint
from ..observing import optimizers_over
from ..preserved_streams import preserved_streams
from ..runs import status_of_script
from ..training import BETWEEN, DATA
from .attach_options import steps_in
from .attached_loop import AttachedLoop
from .custom_loop import CustomLoop, HookCallSwitch
from .forward_arguments import ForwardArguments
from .model_wrappers import unwrap
from .present_tests import check_testable, with_tests

Item = TypeVar("Item")
Result = TypeVar("Result")


class Batches(Iterator[Item]):
    """The batches of a loader, as one epoch of a scope, with the length of the loader, if it has one."""

    def __init__(self, start: Callable[[Iterable[Item]], Iterator[Item]], loader: Iterable[Item]) -> None:
        self._loader, self._iterator = loader, start(loader)

    def __iter__(self) -> Iterator[Item]:
        """Return the iterator, whose first item starts the epoch."""
        return self._iterator

    def __next__(self) -> Item:
        """Return the next batch."""
        return next(self._iterator)

    def __len__(self) -> int:
        """Return the length of the loader; raises ``TypeError`` if it has none, as ``len`` does."""
        try:
            return len(cast(Sized, self._loader))
        except Exception as error:  # list() and others accept no other error
            raise TypeError(f"{type(self._loader).__name__} has no length") from error


class AttachedScope:
    """A view of the hooks attached to a training: folder, hooks, findings and metrics; notebooks show its findings."""

    def __init__(self, attached: AttachedLoop) -> None:
        self._attached = attached

    def follow(self, attached: AttachedLoop) -> None:
        """Show the run of a Trainer's next training from now on."""
        self._attached = attached

    @property
    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._attached.is_closed

    @property
    def folder(self) -> Path:
        """The folder of the run, readable by ``loopscope ls``, ``show`` and ``plot``."""
        return self._attached.path

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of the training."""
        return separate_optimizers(self._attached.driver.task.optimizer)

    @property
    def steps(self) -> int:
        """The number of steps so far, without the open one."""
        return self._attached.driver.loop.step - self._attached.is_in_step()

    def note_origin(self, origin: Mapping[str, Any]) -> None:
        """Add how the training was started to the provenance in its record, before the first step."""
        self._attached.origin = origin

    def is_of(self, attached: AttachedLoop) -> bool:
        """Return whether a loop is the one of this scope."""
        return attached is self._attached

    @property
    def hooks(self) -> list[str]:
        """The names of the active hooks; empty until the run has its model."""
        return [hook.name for hook in self._attached.manager.hooks] if self._attached.is_built else []

    def last_metrics(self, point: HookPoint | None = None) -> dict[str, Any]:
        """Return the newest metrics by full name, of one hook point or all, with tensors as numbers."""
        newest = self._attached.manager.delivery.last(point) if self._attached.is_built else {}
        return {name: value.item() if isinstance(value, Tensor) else value for name, value in newest.items()}

    @property
    def should_stop(self) -> bool:
        """Whether the doctor has reported a critical finding that still holds, such as a loss that is NaN.

        Read it between two steps, and end the loop if it is true; ranks that train together all read it.
        """
        attached = self._attached
        return attached.is_started and attached.ranks.agree(attached.run.diagnosis.has_critical)

    def diagnose(self, *, test: bool = False, branches: int = 4, steps: int = 10) -> Diagnosis:
        """Return the findings about the training up to now, most important first; ``print`` shows them.

        It reads what the hooks have measured; the group ``health`` measures most of what detectors need.

        Args:
            test: between two steps, also try one change at a time in branches from the present state, which are rolled
                back bit for bit, and report the effects. Needs ``loss=``, and ``loader=`` or a last batch of 8 rows.
            branches: number of unchanged branches, and of branches with each change.
            steps: number of training steps of a branch.

        Raises:
            UsageError: if the loop cannot be tested, or not at this moment.
        """
        attached = self._attached
        if test:
            check_testable(attached)
        if not attached.is_started:
            return Diagnosis(unchecked="The training has not started.")
        with preserved_streams():
            history, times = attached.run.diagnosis.history, StepTimes.of(attached.clock.report())
            diagnosis = diagnosis_with(history, attached.manager.delivery.pending(), times)
            return with_tests(attached, diagnosis, branches, steps) if test else diagnosis

    def check(self) -> list[dict[str, Any]]:
        """Return what the hook ``laws`` has found up to now: law, statement, verdict, evidence, remedy.

        Raises:
            UsageError: if the hook is not attached.
        """
        checks = [item for item in self._attached.manager.hooks if item.name == "laws"]
        require(bool(checks), 'No laws are tried: attach with hooks=["laws"].')
        results: list[dict[str, Any]] = checks[0].results()  # type: ignore[attr-defined]
        return results

    def __repr__(self) -> str:
        """Return progress and folder of the run, and its findings."""
        findings = f"\n{self.diagnose()}" if self._attached.is_started else ""
        return f"{self._progress()}: {self.folder}{findings}"

    def _progress(self) -> str:
        """Return whether the run is open, and its epoch and step."""
        attached = self._attached
        if not attached.is_started:
            return "not started"
        loop, planned = attached.manager.state.loop, attached.run.diagnosis.history.planned_steps
        steps = f"step {loop.step:,}" + (f" of {planned:,} ({loop.step / planned:.0%})" if planned else "")
        epoch = f"epoch {loop.epoch}, " if attached.manager.counts_epochs else ""
        return f"{'closed' if attached.is_closed else 'running'}, {epoch}{steps}"


class Scope(AttachedScope):
    """Hooks attached to a custom loop, which reports its progress by these calls.

    ::

        with loopscope.attach(model, optimizer, hooks=["norms"]) as scope:
            for batch in scope.batches(loader):
                loss = loss_fn(model, batch)
                scope.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    """

    def __init__(self, attached: AttachedLoop, loop: CustomLoop, accumulate: int) -> None:
        super().__init__(attached)
        self._loop, self._accumulate = loop, accumulate

    @property
    def loop(self) -> CustomLoop:
        """The observed loop."""
        return self._loop

    def batches(self, loader: Iterable[Item]) -> "Batches[Item]":
        """Return the batches of ``loader`` unchanged, as one epoch of the training; ``len`` is that of the loader.

        With ``accumulate`` above 1 they are micro-batches. A loader of loopscope yields the batches of the current
        epoch, and in a resumed run starts within it. The epoch ends at :meth:`epoch_end`, or when the next one starts.
        """
        return Batches(self._batches, loader)

    def _batches(self, loader: Iterable[Item]) -> Iterator[Item]:
        self._require_open("batches")
        if self._attached.is_started:
            self._loop.end_epoch({})
        self._loop.has_batches = True
        steps = steps_in(loader, self._loop.accumulation)
        if isinstance(loader, Loader):
            loader = loader.batches(*self._loop.next_position())
        is_empty, clock, loop = True, self._attached.clock, self._loop
        clock.enter(DATA)
        for batch in loader:
            is_empty = False
            if loop.arguments is not None:
                loop.note_batch(batch)
            loop.micro_batch(batch, steps)
            yield batch
            clock.mark((DATA, clock.now()))
        clock.enter(BETWEEN)
        if is_empty and not self._attached.place:
            self._loop.report_no_batches()
        self._loop.end_of_data(steps)

    def backward(
        self,
        loss: Tensor,
        *,
        last: bool = False,
        retain_graph: bool = False,
        create_graph: bool = False,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:
        """Run ``loss.backward()``, with the scaler or the Accelerator of the loop, if any.

        The loss is not divided: the losses of a step's micro-batches add up, as their gradients do. ``last`` completes
        a step with fewer micro-batches than ``accumulate``; the other arguments are those of torch.

        Raises:
            UsageError: for an invalid loss, or a call out of order.
        """
        if self._attached.is_closed:
            self._require_open("backward")
        options: dict[str, Any] = {}
        if retain_graph or create_graph or inputs is not None:
            given = {"retain_graph": retain_graph, "create_graph": create_graph, "inputs": inputs}
            options = {name: value for name, value in given.items() if value is not None and value is not False}
        self._loop.backward(loss, options, last=last)

    def gradients_ready(self, loss: Tensor | float | None = None) -> None:
        """Report that all gradients of the step are complete, in place of :meth:`backward`.

        For gradients that the loop computes itself: by ``torch.autograd.grad``, ``torch.func``, per-sample clipping
        (DP-SGD), or several backward passes. ``loss`` is the loss of the step, which is recorded.

        Raises:
            UsageError: for an invalid loss, or a call out of order; in the first step also for a hook with taps that
                was requested by name.
        """
        self._require_open("gradients_ready")
        self._loop.gradients_ready(loss)

    def closure(self, function: Callable[[], Result]) -> Callable[[], Result]:
        """Return ``function`` for an optimizer that evaluates the loss itself: ``optimizer.step(scope.closure(fn))``.

        For LBFGS, SAM and others. ``function`` clears the gradients, runs ``loss.backward()`` and returns the loss.
        Hooks see the gradients of its first evaluation in the step; PRE_UPDATE does not fire. The call only checks the
        function, since every closure that ``optimizer.step`` is given is observed.
        """
        self._require_open("closure")
        kind = type(function).__name__
        advice = "give the closure, optimizer.step(scope.closure(fn))"
        require(callable(function), f"scope.closure was given a {kind}; {advice}.")
        return function

    def evaluate(self, function: Callable[..., Result], *inputs: Any, **options: Any) -> Result:
        """Call ``function`` in isolation from the training, and return its result.

        It runs in eval mode, without gradients, on separate random streams; modes, buffers, generators and weights are
        restored. With ``attach(..., isolate_evaluation=False)`` it runs like a plain call, with all its side effects.
        If it returns a mapping of names to numbers, hooks receive them as the newest evaluation; numbers without names
        are not recorded, which one notice reports. Ranks that train together all call this, and their hooks receive the
        means.
        """
        self._require_open("evaluate", in_evaluation=True)
        if not callable(function):
            kind = type(function).__name__
            raise UsageError(f"scope.evaluate was given a {kind}; give the function: scope.evaluate(validate, model).")
        return self._loop.evaluate(partial(function, *inputs, **options))

    def epoch_end(self, **metrics: float | Tensor) -> None:
        """End the epoch; ``metrics`` are the numbers of its evaluation, such as ``val_loss=0.5``."""
        self._require_open("epoch_end")
        numbers: dict[str, float] = {}
        for name, value in metrics.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, (int, float)):
                raise UsageError(f"{name} is a {type(value).__name__}; the metrics of an epoch must be numbers.")
            numbers[name] = number
        self._loop.end_epoch(numbers)

    def log(self, numbers: Mapping[str, Any] | None = None, **named: Any) -> None:
        """Record numbers of the script at the newest step, as ``reported/NAME``: ``scope.log(val_loss=0.5)``.

        Numbers whose names are those of an evaluation, such as ``val_loss`` or ``eval/accuracy``, are also the newest
        evaluation for hooks. Other values than numbers are left out.
        """
        self._attached.report_numbers({**(numbers or {}), **named})

    def state_dict(self, of: Any = None, key: str = "scope") -> dict[str, Any]:
        """Return the states of hooks and sinks between two steps, for the loop's own checkpoint.

        On several ranks it contains only tensors, for ``torch.distributed.checkpoint.save``, and all ranks call it.
        With ``of``, the metadata of such a checkpoint, it contains empty tensors to load the state under ``key`` into.
        """
        task = self._attached.driver.task
        if of is None and not task.ranks.are_many:
            return self._loop.state_dict()
        if of is not None:
            return allocate_saved(of, key, task.model, task.ranks)
        return flatten_state(self._loop.state_dict(), task.model, task.ranks)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a result of :meth:`state_dict`, before the first step and in the folder of that run.

        With another number of ranks all resume from the state of the first rank; tensors that belong to parameters are
        laid out like these.
        """
        self._attached.load_state_dict(state)

    def close(self, status: str = "completed", error: BaseException | None = None) -> None:
        """End the run: deliver all metrics and write the summary; further calls do nothing.

        A record that cannot be completed, for example since the disk is full, is reported in a warning.

        Raises:
            HookError: if a hook fails at the end, with ``on_hook_error="raise"``.
        """
        if not self._attached.is_closed:
            self._require_open("close")
            self._loop.close(status, error)

    def _require_open(self, call: str, *, in_evaluation: bool = False) -> None:
        """Refuse a call of a closed scope, of a hook, and unless ``in_evaluation`` of an evaluation."""
        attached = self._attached
        require(not attached.is_closed, "This scope is closed; attach a new one for more training.")
        if self._loop.is_in_hook:
            raise HookMisuseError(f"scope.{call}() was called by a hook or a sink; only the loop may call it.")
        is_allowed = in_evaluation or not attached.is_evaluating
        require(is_allowed, f"scope.{call}() was called within scope.evaluate(...); call it after the evaluation.")

    def __enter__(self) -> Self:
        """Return the scope, which is closed after the body."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(status_of_script(error), error)


class WaitingScope(Scope):
    """A scope whose model has no optimizer yet: it begins at the first training pass, when there is one."""

    def __init__(
        self, attached: AttachedLoop, target: nn.Module, observe: Callable[[Any], CustomLoop], accumulate: int
    ) -> None:
        AttachedScope.__init__(self, attached)
        self._target, self._observe, self._accumulate = target, observe, accumulate
        self._passes = ForwardArguments((target, unwrap(target)[0]), self._begin_at_pass, HookCallSwitch().is_entered)
        self._passes.arm()

    def _begin_at_pass(self, batch: Any, *, train: bool) -> None:
        if not train:
            return
        self._begin()
        arguments = self._loop.arguments
        if arguments is not None:
            arguments.receive(batch, train=train)

    def _begin(self) -> None:
        """Attach to the optimizers over the parameters that exist now.

        Raises:
            UsageError: if there is none.
        """
        optimizers = optimizers_over(self._target.parameters())
        kind = type(self._target).__name__
        require(
            bool(optimizers),
            f"attach was given no optimizer, and none trains a parameter of the model ({kind}) at its first training "
            "pass; give attach(model, optimizer), or create the optimizer before the loop.",
        )
        self._passes.stop()
        with preserved_streams():
            self._loop = self._observe(optimizers)

    def __getattr__(self, name: str) -> Any:
        """Begin at the first call that needs the loop."""
        if name != "_loop":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self._begin()
        return self.__dict__["_loop"]

    def close(self, status: str = "completed", error: BaseException | None = None) -> None:
        """End the run, if it has begun."""
        if "_loop" in self.__dict__:
            super().close(status, error)
            return
        self._passes.stop()
        if status == "completed" and not self._attached.is_closed:
            notice("The scope ends without a training pass of its model, so nothing is recorded.")
        self._attached.is_closed = True
