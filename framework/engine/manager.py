"""The hook manager: the interface between a training loop and the hooks of one strategy's run."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from ..combined_optimizers import optimizer_classes
from ..data import Batch, RowNumbers, first_batch, global_batches, with_copied_batches
from ..errors import RunNotice, UsageError, listed, require, warn
from ..hooks import EPOCH_END, Alert, HookPoint, InterventionHook, MetricSink, RunInfo, Tap, TrainingHook, treatments
from ..isolation import Call, Isolation, StateCopy, borrowed_extras, borrowed_modes, undone_pass
from ..state import TrainingState, optimizers_of
from ..taps import TapSet
from ..training import LossProbe, ObservedPass, Profiler, TrainingTask, without_graph
from .budget import BUDGET, Budget, BudgetSettings
from .commits import refuse_commits_for_closures
from .failures import HookFailures, OnError
from .hook_calls import HookCalls, optimizer_groups, with_gradients_borrowed
from .hook_set import HookSet
from .hook_validation import options_of, without_duplicates
from .listeners import Listener
from .log import log
from .metric_delivery import MetricDelivery
from .state_offload import StateOffload

Result = TypeVar("Result")
POST_BACKWARD = HookPoint.POST_BACKWARD
UNNAMED = "unnamed"
"""The name of experiment, strategy and folder of a manager that starts without :class:`RunInfo`."""


class EvaluationListener(Protocol):
    """An observer of evaluations, which must not change what the model computes."""

    def watched(self) -> AbstractContextManager[object]:
        """Return a context manager for one evaluation, which is entered with the model in eval mode."""

    def alerts(self, step: int) -> Iterable[Alert]:
        """Return alerts about the evaluation that has just ended, after ``step``."""


class HookManager:
    """Fires the hooks of one strategy's run; the list of hooks may be empty.

    Its parts are ``hooks`` (the active hooks, their state, failures and tables), ``delivery`` (metrics and sinks),
    ``isolation`` (the gate for all user code) and ``profiler`` (the cost of hooks).

    Args:
        hooks: the hooks in the user's order, in which committing hooks run at each point.
        loop: ``"epoch"`` or ``"step"``.
        required: names of the hooks that must run (default: all). Other hooks are left out if they do not support the
            model, or raise.
        left_out: reasons of hooks that could not be constructed, by name.
        on_error: ``"raise"`` ends the run at the first hook that raises, ``"skip"`` continues without that hook,
            ``"auto"`` continues without it unless it commits.
        audit: compare every byte of the training state before and after every call.
        check_every_call: do not let calls of loopscope's own hooks share checks.
        guardian_device: the device of the copies that undo interventions (``None``: the device of the state).
        profile: measure time and memory of every hook.
        offload_state: keep the state of hooks on the CPU between calls.
        reference_weights: the weights of a reference solution by parameter name, with the placement of the model's.
        evaluation_listeners: observers of the evaluations in eval mode, whose alerts go to the sinks.
        budget: the bound on the time of hooks; by default there is none.
    """

    _started = _ended = False

    def __init__(
        self,
        hooks: Iterable[TrainingHook],
        task: TrainingTask,
        state: TrainingState,
        *,
        loop: str = "epoch",
        required: Collection[str] | None = None,
        left_out: Mapping[str, str] = {},
        sinks: Sequence[MetricSink] = (),
        on_error: OnError = "raise",
        audit: bool = False,
        check_every_call: bool = False,
        guardian_device: torch.device | None = None,
        profile: bool = False,
        offload_state: bool = False,
        reference_weights: Mapping[str, torch.Tensor] | None = None,
        evaluation_listeners: Sequence[EvaluationListener] = (),
        budget: BudgetSettings | None = None,
        compiled: Literal["safe", "all"] = "safe",
    ) -> None:
        named = without_duplicates(hooks)
        refuse_commits_for_closures(treatments(named), task.optimizer)
        self.task = task
        self.state = state
        self.counts_epochs = loop == "epoch"
        """Whether the loop counts epochs (epoch loop) instead of steps (step loop)."""
        self.pre_epoch_copy = StateCopy(guardian_device)
        self.isolation = Isolation(
            state, audit=audit, check_every_call=check_every_call, guardian_device=guardian_device
        )
        self.profiler = Profiler(enabled=profile)
        self.taps = TapSet(task.model, audit=audit, compiled=task.compiled, keeps_all=compiled == "all")
        failures = HookFailures(on_error, {hook.name for hook in named} if required is None else set(required))
        for sentence in left_out.values():
            warn(f"Left out: {sentence}", RunNotice, stacklevel=2)
        failures.left_out.update(left_out)
        self.hooks = HookSet(
            named,
            state,
            self.isolation,
            loop_type=loop,
            taps=self.taps,
            failures=failures,
            profiler=self.profiler,
            offload=StateOffload() if offload_state else None,
            ranks=task.ranks,
        )
        self._numbers = RowNumbers(global_batches(task.loader))
        self.delivery = MetricDelivery(self.isolation, sinks, self.hooks.call, self._rows_of)
        self.budget = None if budget is None else Budget(budget, self.hooks, self.delivery, task.ranks)
        """The budget of the hooks' time, if there is one."""
        self.untapped_pass = self.taps.untapped_pass
        """Context manager without taps, for the extra loss evaluations of a step by optimizers with a closure."""
        self._hook_calls = HookCalls(self.hooks, task, state, self.delivery, guardian_device, reference_weights)
        self.call_hooks: Callable[[HookPoint, Sequence[Listener]], None] = self._hook_calls.call
        self.save_step_streams = self._hook_calls.save_step_streams
        self.call_between_steps = self._hook_calls.call_between_steps
        self.report_evaluation = self._hook_calls.report_evaluation
        self._reference_weights = reference_weights
        self._evaluation_listeners = evaluation_listeners
        self.observed_first_pass: ObservedPass | None = None
        """The pass that hooks share at their start, once it has run."""

    def __del__(self) -> None:
        if self._started and not self._ended and self.delivery.has_pending:
            sentence = "A hook manager was not ended: metrics of its last steps are lost, and files may be incomplete."
            warn(f"{sentence} Call manager.end('completed') after the loop.", RunNotice, stacklevel=2)

    @property
    def origins(self) -> dict[str, TrainingHook]:
        """The origins of metrics by name: the hooks, and what stands for the budget in their place."""
        return {hook.name: hook for hook in (*self.hooks, BUDGET)}

    def check_loop(self, loop: str) -> None:
        """Raise :class:`UsageError` if the manager was made for another loop, or has ended."""
        require(not self._ended, "This hook manager has ended; create a new one for another run.")
        matches = loop == self.hooks.loop_type or not any(True for _ in self.hooks)
        advice = f"create it with HookManager(..., loop={loop!r})"
        require(matches, f"The hook manager of {loop}_loop was created for the {self.hooks.loop_type} loop; {advice}.")

    def run_info(self, experiment: str, strategy: str, output_dir: Path) -> RunInfo:
        """Return the description of a run with this manager, for hooks and sinks."""
        classes = optimizer_classes(self.task.optimizer)
        return RunInfo(
            experiment=experiment,
            strategy=strategy,
            output_dir=output_dir,
            task=self.task,
            loop=self.hooks.loop_type,
            seed=self.state.streams.seed,
            optimizer_class=classes[0] if len(classes) == 1 else Optimizer,
            optimizer_classes=classes,
            optimizer_groups=optimizer_groups(self.task.model, self.task.optimizer),
            reference_weights=self._reference_weights,
            metric_infos=self.hooks.metric_infos(),
            treatments=treatments(self.hooks),
        )

    def start(self, run: RunInfo) -> None:
        """Start every hook and sink, and attach the taps."""
        self.start_hooks(run)
        self.delivery.start(run)

    def start_hooks(self, run: RunInfo, first: Batch | None = None) -> None:
        """Start every hook, and attach the taps; after an error only started hooks remain, which :meth:`end` ends.

        ``first`` is the first batch, for loops whose loader must not be read here.

        Raises:
            UsageError: the manager has started already, a hook refuses the run, or a required intervention could
                change state that cannot be rolled back.
        """
        if self._started:
            raise UsageError("This hook manager has already started; create a new one for another run.")
        self._started = True
        if any(True for _ in self.hooks) and (sentence := self.state.out_of_reach()):
            if mutating := [hook.name for hook in self.hooks if isinstance(hook, InterventionHook) and hook.mutates]:
                self.hooks.leave_out(mutating, "start", UsageError(sentence))
            warn(sentence, RunNotice, stacklevel=2)
        if "needs_loss" not in run.lacks:
            first_pass, observed = partial(self._first_pass, first), partial(self._observed_first_pass, first)
            run = replace(run, first_pass=first_pass, observed_first_pass=observed)
        if self.task.ranks.are_many:
            self.task.ranks.check_equal(self._settings())
        sample_counts = {name: dict(kinds) for name, kinds in self.profiler.samples.items()}
        self.hooks.start(run)
        self.observed_first_pass = None
        self.profiler.samples.update(sample_counts)  # a resumed run has already counted the passes of its start
        self._attach_taps()
        self.hooks.synchronise_failures()
        if self.budget is not None:
            self.budget.start(self.state.loop.step)
            if self.budget.factors:
                self.hooks.timer = self.budget
                self.call_hooks = partial(self._hook_calls.call_within, self.budget)
        names = ", ".join(hook.name for hook in self.hooks) or "none"
        self.log(logging.INFO, "Started %s/%s with the hooks %s.", run.experiment, run.strategy, names)

    def disable_dropped_hooks(self) -> None:
        """Disable hooks that the interrupted run had already dropped; called once state and hooks are restored.

        Hooks that need the state before the epoch wait for the next epoch if the checkpoint does not contain it.
        """
        self.hooks.disable_dropped_hooks()
        if self.is_mid_epoch() and self.state.loop.pre_epoch is None:
            self.hooks.listeners.postpone("needs_pre_epoch_state", EPOCH_END, self.state.loop.epoch + 1)

    def is_mid_epoch(self) -> bool:
        """Return whether the epoch loop is between the first and the last step of an epoch."""
        loop, loader = self.state.loop, self.task.loader
        return self.counts_epochs and loop.step > with_copied_batches(loader).steps_until(loop.epoch)

    def fire(self, point: HookPoint) -> None:
        """Call the hooks that are due at ``point``; the first call starts a manager that was not started."""
        if not self._started:
            self._start_unnamed()
        if point is POST_BACKWARD and not self.taps.is_idle:
            self._check_compiled_taps()
        if listeners := self.hooks.listeners.at[point]:
            self.call_hooks(point, listeners)

    def log(self, level: int, text: str, *arguments: Any) -> None:
        """Log a message to the logger ``loopscope``."""
        log(self.state.streams, level, text, *arguments)

    def raise_failures(self) -> None:
        """Raise the failures of hooks during the step, on any rank; called only between steps."""
        hooks = self.hooks
        if hooks.has_unsynchronised_calls:
            hooks.synchronise_failures()
        if hooks.failures.pending is not None:
            hooks.failures.raise_pending()

    def run_isolated(self, name: str, function: Callable[[], Result]) -> Result:
        """Run code that is not a hook, such as the evaluation, so that it cannot change the run."""
        with self.isolation.visit():
            return self.hooks.run_in_gate(Call(name, "the loop", self.state.loop.step, "The"), function)

    def in_eval_mode(self, name: str, function: Callable[[nn.Module], Result]) -> Result:
        """Call ``function`` with the model in eval mode, isolated from the run."""

        @contextmanager
        def restored() -> Iterator[None]:
            optimizers = optimizers_of(self.state)
            with undone_pass(self.state, optimizers), borrowed_modes(self.task.model, train=False):
                yield

        def run_in_eval_mode() -> Result:
            compute = partial(with_gradients_borrowed, self.state, partial(function, self.task.model))
            with ExitStack() as stack:
                for listener in self._evaluation_listeners:
                    stack.enter_context(listener.watched())
                return without_graph(name, compute, restored, self.task.differentiating)

        result = self.run_isolated(name, run_in_eval_mode)
        for listener in self._evaluation_listeners:
            for alert in listener.alerts(self.state.loop.step):
                self.report(alert, "evaluation")
        return result

    def report(self, alert: Alert, source: str) -> None:
        """Report an alert about the loop itself, on the main rank; ``source`` is what it is about."""
        if self.task.ranks.is_main:
            self.delivery.report(alert, source, self.state.loop.epoch)

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """Open a visit for the body, which reads the run between two steps through :attr:`isolation`."""
        with self.isolation.visit(), self.taps.disabled():
            yield

    def end(self, status: str) -> None:
        """Remove the taps, deliver buffered metrics, and end every hook and sink; a second call does nothing."""
        if self._ended:
            return
        self._ended = True
        self.taps.remove()
        if self.budget is not None:
            self.budget.end()
        if status == "completed" and self._started and self.state.loop.has_unreported_evaluation:
            self.report_evaluation()
        # The stack closes the sinks last, after the hooks, and also if a hook or the flush raises.
        with self.isolation.visit(), ExitStack() as callbacks:
            callbacks.callback(self.delivery.end, status)
            callbacks.callback(self.hooks.end, status)
            if self._started:  # False if a hook of a resumed run rejects its state: the sinks are not open then
                self.delivery.flush_steps(self.state.loop.epoch)
        self.state.loop.update_mean_loss()  # of an interrupted epoch
        self.log(logging.INFO, "Ended as %s after step %d.", status, self.state.loop.step)
        if status == "completed":  # otherwise another error already ends the run
            self.raise_failures()

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be equal on all ranks, since otherwise ranks would wait for each other."""
        task, streams = self.task, self.state.streams
        names = ("length", "eval_every", "snapshot_every", "log_every", "accumulation_steps")
        return {
            "The list of hooks": ", ".join(hook.name for hook in self.hooks),
            **{f"The configuration of hook {hook.name!r}": options_of(hook) for hook in self.hooks},
            "The loop": self.hooks.loop_type,
            "The seed of the hooks' random streams": streams.seed,
            "The number of batches": len(task.loader),
            **{f"The task's {name}": getattr(task, name) for name in names},
        }

    def _start_unnamed(self) -> None:
        """Start without experiment and strategy names and without a folder.

        Raises :class:`UsageError` for a sink that needs a folder.
        """
        run = self.run_info(UNNAMED, UNNAMED, Path(UNNAMED))
        try:
            self.start_hooks(run)
            self.delivery.start(run, fatal=(UsageError, OSError))
        except BaseException as error:
            self.end("failed")
            if not isinstance(error, OSError):
                raise
            raise UsageError(
                f"A sink needs the folder of the run ({type(error).__name__}: {error}), but this hook manager has "
                "none; call manager.start(RunInfo(...)) before the loop."
            ) from error

    def _rows_of(self, step: int) -> torch.Tensor | None:
        with self.state.streams.preserved():
            return self._numbers.of_step(step)

    def _attach_taps(self) -> None:
        """Collect the taps of all started hooks, then attach those of the hooks that are still active."""
        hooks, model = self.hooks, self.task.model

        def declared_taps(hook: TrainingHook) -> list[Tap]:
            taps = list(hook.taps(model)) if hooks.listeners.of(hook) else []  # no listeners: the hook was left out
            if invalid := [tap for tap in taps if not isinstance(tap, Tap)]:
                kinds = "GradientTap(target, kind, function), ForwardTap or AttentionTap(target, function)"
                raise TypeError(f"returned {invalid[0]!r}; taps are {kinds}")
            return taps

        with self.isolation.visit():
            taps = {hook.name: hooks.call(hook, "taps", 0, partial(declared_taps, hook)) for hook in list(hooks)}
        # Outside of the visit, whose checks would report a new module hook as a mutation of the training state.
        while not self._try_to_attach(taps):
            pass

    def _try_to_attach(self, taps: Mapping[str, Sequence[Tap] | None]) -> bool:
        """Attach the taps of all hooks and return ``True``; after a failure remove all taps and return ``False``.

        The hook of an invalid tap is left out; if it is required, its error is raised.
        """
        for hook in self.hooks:
            try:
                self.taps.attach(self.hooks.tap_owner(hook), taps[hook.name] or ())
            except Exception as error:
                self.hooks.leave_out([hook.name], "taps", error)
                return False
        return True

    def _first_pass(self, batch: Batch | None) -> torch.Tensor:
        if batch is None:
            with borrowed_extras(self.state):  # an experiment's loader may change them
                batch = first_batch(with_copied_batches(self.task.loader))
        return LossProbe(self.task, self.state, self.profiler).loss_with_graph(batch)

    def _observed_first_pass(self, batch: Batch | None) -> ObservedPass:
        if self.observed_first_pass is None:
            seen = ObservedPass()
            with seen.observe(self.task.model):
                seen.add_loss(self._first_pass(batch))
            self.observed_first_pass = seen
        return self.observed_first_pass

    def _check_compiled_taps(self) -> None:
        """Report what taps change in graphs of torch.compile, and taps that no graph calls, once each."""
        if self.task.ranks.are_many and (labels := self.taps.disputed(self.task.ranks)):
            self._leave_out_tapping(
                self.taps.hooks_on(labels),
                f"Reading {listed(sorted(labels))} changes the numbers of compiled graphs on some ranks only, so that "
                "the ranks would report different modules. Train without compiling them, or with compiled='all'.",
            )
        if sentence := self.taps.describe_new_graphs():
            self.log(logging.INFO, "%s", sentence)
        if self.taps.is_bypassed:
            self._leave_out_tapping(
                self.taps.hooks,
                "The training calls code that was compiled before the hooks started, without the taps of this one. "
                "Attach before the first compiled step or call torch.compiler.reset() first, and iterate over "
                "scope.batches(loader).",
            )

    def _leave_out_tapping(self, names: set[str], reason: str) -> None:
        if names := names & {hook.name for hook in self.hooks}:
            self.hooks.failures.required -= names  # the training continues without them
            self.hooks.leave_out(names, "taps", UsageError(reason))
