"""A loop of the user's own, as its calls tell of it: which step is open, how far it has come, where an epoch ends."""

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..data import Batch, MicroBatches
from ..errors import RunNotice, UsageError, listed, require
from ..hooks import HookPoint, InterventionHook
from ..state import Transient
from .attached_run import AttachedRun
from .unscaling import unscaled

UNTOLD = frozenset({HookPoint.PRE_UPDATE, HookPoint.POST_STEP})
"""What is seen of a loop that tells nothing."""
TELL = "iterate over scope.batches(loader) and call scope.backward(loss) in place of loss.backward()"


class Accelerates(Protocol):
    """What is asked of an Accelerator: the backward pass, and whether a step's gradients are complete."""

    sync_gradients: bool
    gradient_accumulation_steps: int

    def backward(self, loss: Tensor, *, retain_graph: bool) -> None:
        """Divide the loss by the micro-batches of a step, scale it, and add its gradients."""


class Firing:
    """On while hooks are called: a call of the optimizer is then theirs, and not one of the loop."""

    # entered several times a step, where a context manager made of a generator would show
    is_on = False

    def __enter__(self) -> None:
        self.is_on = True

    def __exit__(self, *error: object) -> None:
        self.is_on = False


AS_THEY_ARE = nullcontext(False)


class CustomLoop(Transient):
    """Turns the calls of a loop, with ``accumulate`` micro-batches in a step, into the transitions of a driver.

    In a loop of Accelerate's, the ``accelerator`` runs backward and says when a step is complete.
    """

    def __init__(self, run: AttachedRun, accumulate: int, accelerator: Accelerates | None) -> None:
        self._run, self._accumulate, self._accelerator = run, accumulate, accelerator
        self._driver = run.driver
        self._optimizer: Optimizer = run.driver.task.optimizer
        self._scaler = run.driver.task.scaler
        self._parts = MicroBatches()
        self._losses: list[Tensor] = []
        self._index = 0
        self._is_open = self._is_complete = self._is_updating = False  # what of a step was had
        self._is_in_epoch = self._is_passed = False  # and what of an epoch
        self._is_untold = self._waits_between = False
        self._firing = Firing()
        self._told: set[str] = set()
        self._handles = [
            self._optimizer.register_step_pre_hook(self._before_update),
            self._optimizer.register_step_post_hook(self._after_update),
        ]

    def micro_batch(self, batch: Batch, steps: int | None, *others: Batch) -> None:
        """Begin a step with its first micro-batch, or go on with the next; ``steps`` are those of an epoch.

        ``others`` are the further ones of the step, where they are known before it.
        """
        run = self._run
        if not run.is_started:
            self._start(batch, steps)
        if self._is_complete:
            self._tell(
                "skipped",
                "No optimizer.step() came after a backward pass, and its step counts as skipped; if several make up a "
                "step, attach(..., accumulate=N) says how many.",
            )
            self._end_step(skipped=True)
        if self._is_passed:
            self.end_epoch({})
        self.settle()
        if not self._is_in_epoch:
            self._is_in_epoch, self._index = True, 0
            if run.manager.counts_epochs:  # else sums go on from one to the next
                with self._firing:
                    self._driver.begin_epoch(takes_snapshot=True)
        del self._parts[len(self._losses) :]  # the loop has dropped it, before its backward pass
        self._parts += [batch, *others]
        if self._is_open:
            self._driver.loop.batch = self._batch
            return
        self._is_open = True
        with self._firing:
            self._driver.begin_step(self._batch, self._index)

    def _start(self, batch: Batch | None, steps: int | None) -> None:
        self._run.start(batch, steps, self.close)
        self._is_in_epoch, self._is_passed, self._index = self._run.place.get("loop", (False, False, 0))
        # the state of a loop may have been taken after the last step of an epoch, and within its body
        self._is_passed = self._is_passed or (self._is_in_epoch and self._index == steps)

    def pass_over(self, steps: int | None) -> None:
        """Note that the data of an epoch were all had; it ends as the next begins, or as the loop says so."""
        if self._run.place and not self._run.is_started:  # of an epoch in which nothing was left
            self._start(None, steps)
        self._is_passed = self._is_in_epoch

    def first(self) -> tuple[int, int]:
        """Return where the data of the next pass begin: the epoch, and the micro-batch in it."""
        run = self._run
        if run.is_started or not run.place:
            return self._driver.loop.epoch + self._is_in_epoch, 0
        in_epoch, is_passed, index = run.place["loop"]
        epoch = run.stored_epoch
        return (epoch, index * self._accumulate) if in_epoch and not is_passed else (epoch + in_epoch, 0)

    @property
    def _batch(self) -> Batch:
        return self._parts if self._accumulate > 1 else self._parts[0]

    def backward(self, loss: Any, *, last: bool, retain_graph: bool) -> None:
        """Run backward; with the last micro-batch of a step its gradients are complete."""
        if not (isinstance(loss, Tensor) and loss.requires_grad and not loss.ndim):
            _check_loss(loss)
        if not self._parts:
            raise UsageError(f"scope.backward(loss) came without a batch: {TELL}.")
        if self._is_complete:
            raise UsageError(
                f"scope.backward(loss) came after the {self._accumulate} micro-batches of a step and before its "
                "optimizer.step(); attach(..., accumulate=N) says how many there are."
            )
        try:
            owner = self._driver.task if self._accelerator is None else self._accelerator
            owner.backward(loss, retain_graph=retain_graph)
        except RuntimeError as error:
            hooks = self._run.manager.hooks
            acting = next((hook.name for hook in hooks if isinstance(hook, InterventionHook) and hook.mutates), "")
            if acting and "modified by an inplace operation" in str(error):
                raise UsageError(
                    f"This loop keeps a graph across steps, in which hook {acting!r} is rolled back: the weights get "
                    "their bytes back, but autograd counts that as a change. Detach what is kept, or leave the hook "
                    f"out. ({error})"
                ) from error
            raise
        if self._accelerator is None:
            self.had_backward(loss.detach(), complete=last or len(self._losses) + 1 >= self._accumulate)
        else:
            shared = self._accelerator.gradient_accumulation_steps
            own = loss.detach() / shared if shared > 1 else loss.detach()
            self.had_backward(own, complete=last or self._accelerator.sync_gradients)

    def had_backward(self, loss: Tensor, *, complete: bool) -> None:
        """Take the loss of a micro-batch, detached, whose gradients are there; ``complete`` are those of the step."""
        self._losses.append(loss)
        if complete:
            self._gradients_complete()

    def settle(self) -> None:
        """Do what waits for the end of a step: between two steps schedulers have stepped, too."""
        if self._waits_between:
            self._waits_between = False
            with self._firing:
                self._run.after_step()

    def _finish_step(self) -> None:
        """End the step that is open, which no update has ended."""
        if self._is_complete:
            self._end_step(skipped=True)
        if self._parts:  # it is dropped with the epoch
            self._parts, self._losses, self._is_open = MicroBatches(), [], False
            self._driver.loop.step -= 1
        self.settle()

    def end_epoch(self, numbers: Mapping[str, float]) -> None:
        """End the epoch, unless none is under way."""
        self._finish_step()
        if self._is_in_epoch:
            self._is_in_epoch = self._is_passed = False
            with self._firing:
                self._run.after_epoch(numbers)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run, between two steps."""
        require(not self._parts, "scope.state_dict() came within a step; call it after optimizer.step().")
        require(self._run.is_started, "scope.state_dict() came before the first step, where there is no state to keep.")
        self.settle()
        self._run.place = {"loop": (self._is_in_epoch, self._is_passed, self._index)}
        return self._run.state_dict()

    def close(self, status: str, error: BaseException | None = None) -> None:
        """End the epoch that is under way, unless the loop has failed, and the run."""
        for handle in self._handles:
            handle.remove()
        try:
            if status == "completed" and self._run.is_started:
                self._finish_step()
                if self._run.manager.counts_epochs:  # a pass that is broken off counts for no epoch of the step loop
                    self.end_epoch({})
        except BaseException as raised:
            status, error = "failed", raised
            raise
        finally:
            self._run.end(status, error)

    def _gradients_complete(self) -> None:
        losses = self._losses
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        self._is_complete = True
        shown = AS_THEY_ARE if self._scaler is None else unscaled(self._driver.task, keeps=self._run.keeps_gradients)
        with self._firing, shown as skipped:
            self._driver.after_backward(loss, skipped=skipped)
        if skipped:
            self._end_step(skipped=True)

    def _before_update(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        # an optimizer that unscales by itself is told so for the call, and is called to skip a step, too
        told = {} if self._scaler is None else vars(optimizer)
        if self._firing.is_on or self._run.is_over or (told.get("found_inf") is not None and bool(told["found_inf"])):
            return
        if (len(inputs) > 1 or options) and any(each is not None for each in (*inputs[1:], *options.values())):
            raise UsageError(
                f"{type(optimizer).__name__}.step was given a closure, which evaluates the loss within the step where "
                "hooks cannot follow: compute the loss before, and call step() without it."
            )
        if self._losses and not self._is_complete:
            self._tell(
                "short",
                f"optimizer.step() came after {len(self._losses)} of {self._accumulate} micro-batches, and "
                "POST_BACKWARD saw the gradients as they were then; say scope.backward(loss, last=True) for the last "
                "one of a shorter group.",
            )
            self._gradients_complete()
        if not self._is_complete:
            self._untold()
        self._is_updating = self._is_complete or self._is_untold
        if self._is_updating:
            is_scaled, task = told.get("grad_scale") is not None, self._driver.task
            shown = unscaled(task, keeps=self._run.keeps_gradients) if is_scaled else AS_THEY_ARE
            with self._firing, shown:
                self._driver.before_update()

    def _after_update(self, optimizer: Optimizer, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        if self._is_updating and not self._firing.is_on:
            self._end_step(skipped=False)

    def _end_step(self, *, skipped: bool) -> None:
        with self._firing:
            self._driver.after_update(skipped=skipped)
        self._parts, self._losses = MicroBatches(), []
        self._is_open = self._is_complete = self._is_updating = False
        self._index += 1
        self._waits_between = True

    def _untold(self) -> None:
        """Take a step of a loop that says nothing of it."""
        run = self._run
        if not run.is_started:
            hooks = run.manager.hooks
            only = "loop tells of nothing but its updates"
            hooks.keep_to(UNTOLD, f"this {only}; {TELL}.")
            left = listed([*hooks.failures.left_out]) or "none"
            run.start(None, None, self.close)
            self._is_untold = True
            self._tell("untold", f"This {only}, so hooks see no more, and are left out: {left}; {TELL}.")
        if self._is_untold:
            self.settle()
            self._driver.loop.step += 1
        else:
            what = "a scope.backward(loss)" if self._parts else "a batch"
            self._tell("unseen", f"optimizer.step() came without {what} before it, and hooks have not seen it: {TELL}.")

    def _tell(self, kind: str, sentence: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(sentence, RunNotice, stacklevel=4)


def _check_loss(loss: Any) -> None:
    kind = type(loss).__name__
    if isinstance(loss, (tuple, list)):
        raise UsageError(f"The loss is a {kind} of {len(loss)}; give scope.backward the loss alone, perhaps its first.")
    if not isinstance(loss, Tensor):
        raise UsageError(f"The loss is a {kind}, not a tensor; give scope.backward what loss.backward() was called on.")
    if loss.numel() != 1:
        raise UsageError(f"The loss has shape {tuple(loss.shape)}; give scope.backward a single number: loss.mean().")
    if not loss.requires_grad:
        raise UsageError("The loss has no graph to differentiate; compute it with gradients on, and do not detach it.")
