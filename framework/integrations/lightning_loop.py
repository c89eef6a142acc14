"""Translation of Lightning's Trainer events into transitions of a driver, with wrappers where events are missing."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import ceil, isfinite
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..checkpoints import flatten_state, gather_tensors
from ..combined_optimizers import CombinedOptimizer, single_scheduler
from ..data import Batch, MicroBatches
from ..errors import LoopscopeError, NoLossError, UsageError, require
from ..hooks import ENDLESS
from ..runs import status_of_script
from ..state import Transient
from ..training import FORWARD, OTHER, is_skipped, takes_closure
from .attached_loop import AttachedLoop
from .gradient_unscaling import unscaled_gradients
from .model_wrappers import temporary_attribute, unwrap
from .scope import AttachedScope
from .validation_records import ValidationRecords

TESTED = "2.6"
ONE_BATCH = "take steps of one batch: accumulate_grad_batches=1"


class LightningLoop(Transient):
    """Translates the events of a Trainer into transitions of a driver; every fit is a separate run.

    ``attach_to`` combines it with Lightning's callback class.
    """

    state_key = "loopscope"

    def __init__(self, trainer: Any, attached: AttachedLoop) -> None:
        super().__init__()
        self._trainer, self._attached, self.scope = trainer, attached, AttachedScope(attached)
        self._reset()

    def _reset(self) -> None:
        """Prepare for a fit."""
        self._contexts = ExitStack()
        self._stage = ""  # of the step: "" between steps, then open, complete and updating, or skipped
        self._parts = MicroBatches()
        self._losses: list[Tensor] = []
        self._index = self._first_index = 0  # of the step in the epoch
        self._is_on = self._is_in_epoch = False
        self._numbers: dict[str, float] = {}
        self._stored: dict[str, Any] = {}  # of the checkpoint that the fit resumes from
        self._state: dict[str, Any] = {}  # for checkpoints before the run, after it and within a validation

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Start a new run for another fit; one that was attached again has replaced this callback."""
        if stage == "fit" and self._attached.is_closed:
            self._reset()
            self._attached = self._attached.successor()
            self.scope.follow(self._attached)

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Wrap clipping and validation, which have no events; refuse optimizers whose steps hooks cannot follow."""
        check_names(module, ("_compiler_ctx",))
        for optimizer in trainer.optimizers:
            require(
                not takes_closure(optimizer),
                f"{type(optimizer).__name__} evaluates the loss within its step, where hooks cannot follow Lightning; "
                "train with an optimizer that takes no closure, or in an experiment.",
            )
        if not module.automatic_optimization and self._attached.options.loss is None:
            self._attached.add_lacks(
                {
                    "needs_loss": f"{type(module).__name__} sets automatic_optimization to False, so its training_step "
                    "takes the optimizer steps itself: give loss=function(module, batch), which returns a loss"
                }
            )
        self._is_on = True
        self._records = ValidationRecords(module)
        plugin, validation = trainer.precision_plugin, trainer.fit_loop.epoch_loop.val_loop
        clip, validate = partial(self._clip, plugin._clip_gradients), partial(self._validate, validation.run)
        self._contexts.enter_context(temporary_attribute(plugin, "_clip_gradients", clip))
        self._contexts.enter_context(temporary_attribute(validation, "run", validate))

    def _start(self, batch: Batch) -> None:
        """Build and start the run before the first step, with its batch."""
        trainer, attached = self._trainer, self._attached
        module, per_step = trainer.lightning_module, trainer.accumulate_grad_batches
        require(batch is not None, "training_step takes dataloader_iter, so hooks see no batch; make it take a batch.")
        schedulers = trainer.lr_scheduler_configs
        optimizers = trainer.optimizers
        attached.settings = fit_settings(trainer, module)
        attached.build(
            module,
            optimizers[0] if len(optimizers) == 1 else CombinedOptimizer(optimizers),
            scheduler=single_scheduler([config.scheduler for config in schedulers]),
            scaler=vars(trainer.precision_plugin).get("scaler"),
            loss=attached.options.loss or self._loss,
            replica=unwrap(trainer.strategy.model)[1],
            accumulate=per_step,
            compiled=module._compiler_ctx is not None,
            scheduler_interval=schedulers[0].interval if schedulers else "epoch",
        )
        if self._stored:
            attached.load_state_dict(self._stored)
        elif trainer.global_step:
            attached.begin_at(trainer.current_epoch, trainer.global_step)
            self._first_index = trainer.fit_loop.epoch_loop.batch_idx // per_step
        attached.plan.limit = trainer.max_steps if trainer.max_steps > 0 else ENDLESS
        attached.plan.schedule = self._schedule()
        attached.start(batch, self._steps, self._finish)
        self._is_in_epoch, self._index, within, evaluation = attached.place.get("loop", (False, 0, False, {}))
        attached.driver.loop.step -= within  # Lightning's checkpoints have no gradients, so the step is repeated
        if evaluation := self._numbers or evaluation:
            attached.driver.record_evaluation(evaluation)
        self._numbers, self._state = {}, {}

    @property
    def _steps(self) -> int | None:
        """The number of steps of the current epoch, if the data have a length."""
        batches = self._trainer.num_training_batches
        return ceil(batches / self._trainer.accumulate_grad_batches) if isfinite(batches) else None

    def _schedule(self) -> Callable[[int], int] | None:
        """Return the number of steps of each epoch under Lightning's scheduler of the accumulation, if there is one."""
        batches = self._trainer.num_training_batches
        scheduler = accumulation_scheduler(self._trainer)
        if scheduler is None or not isfinite(batches):
            return None
        return lambda epoch: ceil(batches / scheduler.get_accumulate_grad_batches(epoch))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of hooks, sinks and loop on all ranks, for Lightning's checkpoint."""
        if not self._attached.is_started:
            return self._state
        state, task = self._rank_state(), self._attached.driver.task
        if not task.ranks.are_many:
            return state
        return gather_tensors(flatten_state(state, task.model, task.ranks), task.ranks)

    def _rank_state(self) -> dict[str, Any]:
        if self._state or not self._attached.is_started:
            return self._state
        self._attached.place = self._place
        return self._attached.state_dict()

    @property
    def _place(self) -> dict[str, Any]:
        return {"loop": (self._is_in_epoch, self._index, self._stage != "", self._numbers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the fit that resumes from it; tests and validations ignore it."""
        if self._trainer.state.fn == "fit" and not self._attached.is_closed:
            self._stored = self._state = state_dict

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End the run while the model is still on the device of its training."""
        self._finish("completed")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End a run that has not started."""
        if stage == "fit":
            self._finish("completed")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End the run as failed, or interrupted."""
        self._finish(status_of_script(exception), exception)

    def _finish(self, status: str, error: BaseException | None = None) -> None:
        """Remove the wrappers and end the run; its state is kept for checkpoints that are written later."""
        self._is_on = False
        self._contexts.close()
        try:
            if not isinstance(error, LoopscopeError):
                self._state = self._rank_state()
        finally:
            if self._attached.is_built:
                self._attached.end(status, error)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        """Start a step with its first micro-batch, or continue it with the next one."""
        # Private: set by StochasticWeightAveraging for the pass that computes BatchNorm's statistics, without steps.
        if not self._is_on or getattr(trainer.fit_loop, "_skip_backward", False):
            return
        if not self._attached.is_started:
            self._start(batch)
        driver = self._attached.driver
        if self._is_in_epoch and batch_idx == 0:  # the checkpoint was between the last step and the end of its epoch
            self._end_epoch()
        if not self._is_in_epoch:
            self._is_in_epoch, self._index, self._first_index = True, self._first_index, 0
            self._attached.plan.begin_epoch(driver.loop.epoch, driver.loop.step - self._index, self._steps)
            self._refuse_micro_batches()
            driver.begin_epoch(snapshot_follows=True)
        self._parts.append(batch)
        step_batch = self._parts if trainer.accumulate_grad_batches > 1 or len(self._parts) > 1 else batch
        if self._stage:
            driver.loop.batch = step_batch
            driver.clock.enter(FORWARD)
        else:
            self._stage = "open"
            driver.begin_step(step_batch, self._index)

    def _refuse_micro_batches(self) -> None:
        """Leave out the hooks that need the complete batch of a step, if the module has started to accumulate."""
        count, hooks = self._trainer.accumulate_grad_batches, self._attached.manager.hooks
        if count > 1 and any(hook.needs_next_batch for hook in hooks):
            sentence = f"accumulate_grad_batches has become {count}, and a step's batch is complete only at its end"
            hooks.leave_out_needing("needs_next_batch", UsageError(f"{sentence}; {ONE_BATCH}."))

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Record the unscaled loss of a micro-batch, which Lightning has divided by their number and scaled."""
        if self._stage == "open":
            scaler = self._attached.driver.task.scaler
            self._attached.driver.before_backward(loss, is_scaled=scaler is not None and scaler.is_enabled())
            self._losses.append(loss.detach() if scaler is None else loss.detach() / scaler.get_scale())

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        """Note the end of a backward pass."""
        if self._stage == "open":
            self._attached.driver.clock.enter(OTHER)

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Show hooks the complete gradients before clipping; with several optimizers before the first of them."""
        if self._stage != "open" or not self._losses:
            return
        driver, losses = self._attached.driver, self._losses
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        with unscaled_gradients(self._attached) as overflowed:
            skipped = overflowed or is_skipped(driver.task)
            self._stage = "skipped" if skipped else "complete"
            driver.after_backward(loss, skipped=skipped)

    def _clip(self, clip: Callable[..., None], *inputs: Any, **options: Any) -> None:
        """Show hooks the gradients after ``clip``."""
        clip(*inputs, **options)
        if self._stage == "complete":
            self._stage = "updating"
            with unscaled_gradients(self._attached):
                self._attached.driver.before_update()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """End the step after its last micro-batch; schedulers with a step interval have already stepped."""
        if not module.automatic_optimization and self._stage == "open":  # the module accumulates gradients itself
            return
        # Private: Lightning's own test of whether further micro-batches of this step follow.
        if self._is_on and self._stage and not trainer.fit_loop._should_accumulate():
            self._attached.driver.after_update(skipped=self._stage != "updating")
            self._forget_step()
            self._index += 1
            self._report_logged(trainer)
            self._attached.after_step()

    def _report_logged(self, trainer: Any) -> None:
        """Record what the module has logged of a step, at the steps whose numbers Lightning gives to its loggers.

        Averages over an epoch are left out: after a resume within it Lightning averages only the rest of the epoch.
        They are read before callbacks write checkpoints, so that the record of a resumed fit has them too.
        """
        # Private: the counter of Lightning's own rule (without its extra log at a stop), and the values of the step.
        step, every = trainer.fit_loop.epoch_loop._batches_that_stepped + 1, trainer.log_every_n_steps
        if every and step % every == 0 and trainer._results is not None:
            self._attached.report_numbers(trainer._results.metrics(on_step=True)["log"], evaluates=False)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """End the epoch, after its validation."""
        if self._is_on and self._is_in_epoch and self._attached.is_started:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._stage:  # the module's on_train_batch_start has ended the epoch before the step was complete
            self._forget_step()
            self._attached.driver.loop.step -= 1
        self._is_in_epoch = False
        self._attached.after_epoch({})

    def _forget_step(self) -> None:
        self._stage, self._parts, self._losses = "", MicroBatches(), []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Keep the numbers of a validation, since a checkpoint may be written before hooks receive them."""
        if self._is_on and not trainer.sanity_checking:
            # Private: `callback_metrics` would also contain the numbers of the training.
            metrics = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
            self._numbers = {name: value.item() for name, value in metrics.items()}
            if self._attached.is_started:
                self._state = self._state | {"place": self._place}

    def _validate(self, validate: Callable[[], Any]) -> Any:
        """Call ``validate`` so that it cannot change the training."""
        attached, module = self._attached, self._trainer.lightning_module
        self._state = self._rank_state()  # a checkpoint may be written during the validation
        try:
            # Lightning itself isolates its sanity check.
            with (
                attached.evaluating(module, self._trainer.optimizers, notices=not self._trainer.sanity_checking),
                self._records.noted(),
            ):
                result = validate()
            self._records.keep()
        finally:
            self._state = {}
        if self._numbers and attached.is_started:
            attached.driver.record_evaluation(self._numbers)
            self._numbers = {}
        return result

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss that Lightning would differentiate for a micro-batch, without logging."""
        trainer, module, count = self._trainer, cast(Any, model), int(self._trainer.accumulate_grad_batches)
        loop = trainer.fit_loop.epoch_loop
        # Private: Lightning decides only here whether training_step also takes batch_idx.
        inputs = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
        with trainer.precision_plugin.train_step_context(), temporary_attribute(module, "log", _log_nothing):
            output = module.training_step(*inputs.values())
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise NoLossError("training_step returned None for a hook's pass, as for a batch that Lightning skips.")
        if not isinstance(loss, Tensor):
            raise LoopscopeError(f"training_step returned {loss!r} for a hook's pass; it must return a loss.")
        return loss / count


def accumulation_scheduler(trainer: Any) -> Any:
    """Return Lightning's callback that changes the accumulation from epoch to epoch, or ``None``."""
    name = "get_accumulate_grad_batches"
    return next((callback for callback in trainer.callbacks if hasattr(callback, name)), None)


def fit_settings(trainer: Any, module: Any) -> dict[str, Any]:
    """Return the hyper-parameters of a LightningModule, and the Trainer's settings that decide its training."""
    settings = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps, "precision": trainer.precision}
    settings |= {"gradient_clip_val": trainer.gradient_clip_val}
    return {**settings, **dict(getattr(module, "hparams", {}))}


def check_names(owner: Any, names: tuple[str, ...]) -> None:
    """Raise :class:`UsageError` unless an object has these dotted names, some of them private."""
    for name in names:
        try:
            attrgetter(name)(owner)
        except AttributeError as error:
            raise UsageError(
                f"This version of Lightning has no {type(owner).__name__}.{name}, which attach requires; Lightning "
                f"{TESTED} has it."
            ) from error


def _log_nothing(*arguments: Any, **options: Any) -> None:
    """Stand in for the log of a module in passes of hooks."""
