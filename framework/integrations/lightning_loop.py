"""The events of Lightning's Trainer as the transitions of a driver, and around it what Lightning has no event for."""

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
from ..data import Batch, MicroBatches
from ..errors import LoopscopeError, UsageError, require
from ..state import Transient
from ..training import is_skipped, takes_closure
from .attached_run import AttachedRun
from .model_wrappers import replaced, unwrapped
from .unscaling import unscaled

TESTED = "2.6"


class LightningLoop(Transient):
    """Turns the events of a Trainer into the transitions of a driver, and puts all back when the fit is over.

    It becomes a callback by ``attach_to``.
    """

    state_key = "loopscope"

    def __init__(self, trainer: Any, run: AttachedRun) -> None:
        super().__init__()
        self._trainer, self._run = trainer, run
        self._held = ExitStack()
        self._stage = ""  # of the step: "" between two, then open, complete, updating; or skipped
        self._parts = MicroBatches()
        self._losses: list[Tensor] = []
        self._index = 0
        self._is_on = self._is_in_epoch = False
        self._numbers: dict[str, float] = {}
        self._stored: dict[str, Any] = {}  # of the checkpoint from which the fit goes on
        self._state: dict[str, Any] = {}  # what checkpoints get before the run, after it, and within a validation

    @property
    def is_over(self) -> bool:
        """Whether the fit that it was made for is over."""
        return self._run.is_over

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Wrap what Lightning has no event for, unless steps are taken as no hook can follow."""
        if self.is_over:
            return
        check_names(module, ("_compiler_ctx",))
        require(
            module.automatic_optimization,
            f"{type(module).__name__} sets automatic_optimization to False and steps its {len(trainer.optimizers)} "
            "optimizer(s) itself, where hooks cannot follow; leave the steps to Lightning, or write the loop and "
            "attach hooks to that.",
        )
        optimizer = trainer.optimizers[0]
        require(
            not takes_closure(optimizer),
            f"{type(optimizer).__name__} evaluates the loss within its step, where hooks cannot follow Lightning; "
            "train with an optimizer that takes no closure, or in an experiment.",
        )
        self._is_on = True
        plugin, validation = trainer.precision_plugin, trainer.fit_loop.epoch_loop.val_loop
        self._held.enter_context(replaced(plugin, "_clip_gradients", partial(self._clip, plugin._clip_gradients)))
        self._held.enter_context(replaced(validation, "run", partial(self._validate, validation.run)))

    def _start(self, batch: Batch) -> None:
        """Build and start the run before the first step, on its batch."""
        trainer, run = self._trainer, self._run
        module, per_step = trainer.lightning_module, trainer.accumulate_grad_batches
        require(batch is not None, "training_step takes dataloader_iter, so hooks see no batch; let it take a batch.")
        schedulers = trainer.lr_scheduler_configs
        run.build(
            module,
            trainer.optimizers[0],
            scheduler=schedulers[0].scheduler if schedulers else None,
            scaler=vars(trainer.precision_plugin).get("scaler"),
            loss=run.choices.loss or self._loss,
            replica=unwrapped(trainer.strategy.model)[1],
            accumulate=per_step,
            compiled=module._compiler_ctx is not None,
            scheduler_interval=schedulers[0].interval if schedulers else "epoch",
        )
        if self._stored:
            run.load_state_dict(self._stored)
        batches = trainer.num_training_batches
        run.start(batch, ceil(batches / per_step) if isfinite(batches) else None, self._leave)
        self._is_in_epoch, self._index, within, evaluation = run.place.get("loop", (False, 0, False, {}))
        run.driver.loop.step -= within  # whose gradients no checkpoint of Lightning's has
        if evaluation := self._numbers or evaluation:
            run.driver.evaluated(evaluation)
        self._numbers, self._state = {}, {}

    def state_dict(self) -> dict[str, Any]:
        """Return what hooks, sinks and the loop know, of each rank, for Lightning's checkpoint, which one writes."""
        if not self._run.is_started:
            return self._state
        state, task = self._own_state(), self._run.driver.task
        if not task.ranks.are_many:
            return state
        return gather_tensors(flatten_state(state, task.model, task.ranks), task.ranks)

    def _own_state(self) -> dict[str, Any]:
        if self._state or not self._run.is_started:
            return self._state
        self._run.place = self._place
        return self._run.state_dict()

    @property
    def _place(self) -> dict[str, Any]:
        return {"loop": (self._is_in_epoch, self._index, self._stage != "", self._numbers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint with the fit that comes; a test or a validation takes nothing of it."""
        if self._trainer.state.fn == "fit" and not self.is_over:
            self._stored = self._state = state_dict

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """End the run while the model lies where it was trained."""
        self._leave("completed")

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        """End a run that never began."""
        if stage == "fit":
            self._leave("completed")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        """End the run as failed, or interrupted."""
        self._leave("interrupted" if isinstance(exception, KeyboardInterrupt) else "failed", exception)

    def _leave(self, status: str, error: BaseException | None = None) -> None:
        """Put back what was wrapped, and end the run; what it knew stays for checkpoints that are written later."""
        self._is_on = False
        self._held.close()
        try:
            if not isinstance(error, LoopscopeError):
                self._state = self._own_state()
        finally:
            if self._run.is_built:
                self._run.end(status, error)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        """Begin a step with its first micro-batch, or go on with the next."""
        if not self._is_on:
            return
        if not self._run.is_started:
            self._start(batch)
        driver = self._run.driver
        if self._is_in_epoch and batch_idx == 0:  # the checkpoint lay between the last step and the end of its epoch
            self._end_epoch()
        if not self._is_in_epoch:
            self._is_in_epoch, self._index = True, 0
            driver.begin_epoch(takes_snapshot=True)
        self._parts.append(batch)
        whole = self._parts if trainer.accumulate_grad_batches > 1 else batch
        if self._stage:
            driver.loop.batch = whole
        else:
            self._stage = "open"
            driver.begin_step(whole, self._index)

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        """Keep the loss of a micro-batch, which Lightning has divided by those of a step, and scaled."""
        if self._stage == "open":
            scaler = self._run.driver.task.scaler
            self._losses.append(loss.detach() if scaler is None else loss.detach() / scaler.get_scale())

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Show the gradients, complete and not yet clipped."""
        if self._stage != "open" or not self._losses:
            return
        driver, losses = self._run.driver, self._losses
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        with unscaled(driver.task, keeps=self._run.keeps_gradients) as overflowed:
            skipped = overflowed or is_skipped(driver.task)
            self._stage = "skipped" if skipped else "complete"
            driver.after_backward(loss, skipped=skipped)

    def _clip(self, clip: Callable[..., None], *inputs: Any, **options: Any) -> None:
        """Show hooks the gradients after ``clip``."""
        clip(*inputs, **options)
        if self._stage == "complete":
            self._stage = "updating"
            with unscaled(self._run.driver.task, keeps=self._run.keeps_gradients):
                self._run.driver.before_update()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        """End the step with its last micro-batch; schedulers that count steps have stepped."""
        if self._is_on and self._stage and not trainer.fit_loop._should_accumulate():
            self._run.driver.after_update(skipped=self._stage != "updating")
            self._forget_step()
            self._index += 1
            self._run.after_step()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        """End the epoch; the validation at its end is over."""
        if self._is_on and self._is_in_epoch and self._run.is_started:
            self._end_epoch()

    def _end_epoch(self) -> None:
        if self._stage:  # the module's on_train_batch_start ended the epoch
            self._forget_step()
            self._run.driver.loop.step -= 1
        self._is_in_epoch = False
        self._run.after_epoch({})

    def _forget_step(self) -> None:
        self._stage, self._parts, self._losses = "", MicroBatches(), []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Keep the numbers of a validation; a checkpoint may be written before hooks can be told of them."""
        if self._is_on and not trainer.sanity_checking:
            found = trainer.fit_loop.epoch_loop.val_loop._results.metrics(on_step=False)["callback"]
            self._numbers = {name: value.item() for name, value in found.items()}
            if self._run.is_started:
                self._state = self._state | {"place": self._place}

    def _validate(self, validate: Callable[[], Any]) -> Any:
        """Call ``validate`` so that it cannot change the training."""
        run, module = self._run, self._trainer.lightning_module
        self._state = self._own_state()  # a checkpoint may be written within
        try:
            with run.evaluating(module):
                found = validate()
        finally:
            self._state = {}
        if self._numbers and run.is_started:
            run.driver.evaluated(self._numbers)
            self._numbers = {}
        return found

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what Lightning would run backward on for a micro-batch; nothing of it is logged."""
        trainer, module, pieces = self._trainer, cast(Any, model), int(self._trainer.accumulate_grad_batches)
        loop = trainer.fit_loop.epoch_loop
        inputs = loop._build_kwargs(OrderedDict(), batch, loop.batch_idx)
        with trainer.precision_plugin.train_step_context(), replaced(module, "log", lambda *args, **options: None):
            output = module.training_step(*inputs.values())
        loss = output["loss"] if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            raise LoopscopeError(f"training_step returned {loss!r} for a hook's pass, and no loss.")
        return loss / pieces


def check_names(owner: Any, names: tuple[str, ...]) -> None:
    """Raise :class:`UsageError` unless an object has these names, some of which are private."""
    for name in names:
        try:
            attrgetter(name)(owner)
        except AttributeError as error:
            raise UsageError(
                f"This version of Lightning has no {type(owner).__name__}.{name}, on which attach relies; Lightning "
                f"{TESTED} works."
            ) from error
