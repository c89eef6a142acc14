"""Hooks in Hugging Face's Trainer: its calls are passed to a :class:`.CustomLoop`, its evaluation is isolated.

Tested with transformers 5.23 and accelerate 1.15. The Trainer has neither an event before its clipping nor one with the
batches of a step, so a few of its methods are wrapped during training.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial, wraps
from pathlib import Path
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from transformers import DefaultFlowCallback, PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ..checkpoints import FRESH_STREAMS, CheckpointWriter, checkpoint_folders, open_checkpoint, read_content
from ..data import Batch
from ..errors import UsageError, notice, require
from ..isolation import undone_in_modules
from ..runs import status_of_script
from ..state import Transient, optimizers_of
from ..training import DATA, FORWARD, OTHER, takes_closure
from .attach_options import AttachOptions, steps_in
from .attached_loop import AttachedLoop
from .custom_loop import CustomLoop
from .logger_sink import route_through_trainer
from .model_wrappers import temporary_attribute, unwrap
from .scope import AttachedScope

TESTED = "transformers 5.23"
NOT_SETTINGS = re.compile(r"_dir$|log|save|report_to|run_name|hub|token|disable_tqdm|do_|resume|eval_")
"""Names of arguments of a Trainer that do not change its training."""
STATE = "loopscope"
"""The folder of the hooks' state in a checkpoint of the Trainer."""
REQUIRED_METHODS = (
    *("train", "training_step", "get_batch_samples", "evaluate", "predict", "compute_loss", "add_callback"),
    *("compute_loss_context_manager", "_prepare_inputs", "_get_num_items_in_batch", "_load_optimizer_and_scheduler"),
)
"""Methods of a Trainer that are wrapped or called; those with an underscore are private and may change."""
NOT_COUNTERS = (
    *("args", "accelerator", "optimizer", "lr_scheduler", "callback_handler", "processing_class", "data_collator"),
    *("train_dataset", "eval_dataset"),
)
"""Attributes of a Trainer that its loss does not count in."""
COST_SUFFIXES = ("_runtime", "_per_second", "_time", "epoch")
"""Suffixes of an evaluation's numbers that measure its cost and not the model."""
NOT_LOGGERS = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
"""Callbacks that are not loggers."""

for _kind in (GradientState, AcceleratorState, PartialState, Trainer):
    Transient.register(_kind)  # optimizers and schedulers of accelerate refer to them, but they are no training state


def attach_to(trainer: Any, options: AttachOptions) -> AttachedScope:
    """Attach hooks to a Trainer before its training; raise :class:`UsageError` for an unsupported one."""
    missing = [name for name in REQUIRED_METHODS if not callable(getattr(trainer, name, None))]
    require(not missing, f"This Trainer has no {', '.join(missing)}, which attach requires; {TESTED} has them.")
    earlier = [item for item in trainer.callback_handler.callbacks if isinstance(item, TrainerEvents)]
    is_attached = any(not events.attached.is_closed for events in earlier)
    require(not is_attached, "A run is already attached to this Trainer; use the scope that the first attach returned.")
    has_many_devices = trainer.args.n_gpu > 1
    require(
        not has_many_devices,
        "This Trainer trains on several devices in one process; start one process per device with torchrun.",
    )
    is_fsdp1 = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    require(not is_fsdp1, "This Trainer shards its model with FSDP version 1; set fsdp_version 2 to attach hooks.")
    require(not trainer.is_deepspeed_enabled, "This Trainer trains with DeepSpeed; use DDP, or fsdp_version 2.")
    restarts = trainer.args.auto_find_batch_size
    require(not restarts, "auto_find_batch_size may restart the training; set the batch size to attach hooks.")
    lacks = {need: advice for need, advice in options.lacks().items() if need != "needs_loss"}
    events = TrainerEvents(trainer)
    attached = AttachedLoop(route_through_trainer(options, events.log), lacks, Path(trainer.args.output_dir), bar=False)
    events.attached, events.scope = attached, AttachedScope(attached)
    for closed in earlier:
        closed.detach()
    events.wrap_train()
    trainer.add_callback(events)
    return events.scope


class TrainerEvents(TrainerCallback):
    """Passes a Trainer's events and method calls to a :class:`.CustomLoop`; every training is a separate run."""

    attached: AttachedLoop
    scope: AttachedScope

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop: CustomLoop | None = None
        self._parts: list[Batch] = []
        self._items: Any = None
        self._steps: int | None = None
        self._stored: Path | None = None
        self._wrapper = ExitStack()

    def wrap_train(self) -> None:
        """Wrap the Trainer's method ``train`` until :meth:`detach`."""
        train = self._trainer.train
        training = wraps(train)(partial(self.training, train))
        self._wrapper.enter_context(temporary_attribute(self._trainer, "train", training))

    def detach(self) -> None:
        """Remove a closed run from the Trainer."""
        self._wrapper.close()
        self._trainer.remove_callback(self)

    def training(self, train: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Call ``train`` with the Trainer's methods wrapped, close the run in any case, and return the result."""
        if self.attached.is_closed:
            self.attached = self.attached.successor()
            self.scope.follow(self.attached)
        self._loop, self._parts, self._items, self._stored = None, [], None, None
        with self._wrapped():
            try:
                result = train(*inputs, **options)
            except BaseException as error:
                self._close(status_of_script(error), error)
                raise
            self._close("completed")
            return result

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        trainer = self._trainer
        wrappers: dict[str, Callable[..., Any]] = {
            "get_batch_samples": self._on_batches,
            "training_step": self._on_training_step,
            "evaluate": self._on_evaluation,
            "predict": self._on_evaluation,
            "_load_optimizer_and_scheduler": self._on_loading,
        }
        accelerator = trainer.accelerator
        with ExitStack() as contexts:
            backward = wraps(accelerator.backward)(partial(self._on_backward, accelerator.backward))
            contexts.enter_context(temporary_attribute(accelerator, "backward", backward))
            for name, wrapper in wrappers.items():
                method = getattr(trainer, name)
                contexts.enter_context(temporary_attribute(trainer, name, wraps(method)(partial(wrapper, method))))
            yield

    def _close(self, status: str, error: BaseException | None = None) -> None:
        if self._loop is not None:
            self._loop.close(status, error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Create the run, now that the Trainer has prepared model and optimizer."""
        trainer, attached = self._trainer, self.attached
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if takes_closure(optimizer):
            raise UsageError(f"{type(optimizer).__name__} needs a closure, which a Trainer does not provide.")
        # Without folders, logging, saving and secrets.
        attached.settings = {name: value for name, value in args.to_dict().items() if not NOT_SETTINGS.search(name)}
        wrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=True)
        attached.build(
            trainer.model,
            optimizer,
            scheduler=scheduler,
            scaler=trainer.accelerator.scaler,
            loss=self._loss,
            replica=unwrap(trainer.model_wrapped)[1],
            accumulate=args.gradient_accumulation_steps,
            compiled=wrapped is not trainer.model,
            length=int(state.num_train_epochs if attached.options.loop != "step" else state.max_steps),
            scheduler_interval="step",
        )
        for path in [*checkpoint_folders(self._stored)][:1] if self._stored is not None else ():
            task, checkpoint = attached.driver.task, open_checkpoint(path)
            is_shared = checkpoint.is_of_ranks
            content = read_content(checkpoint, task.model, task.ranks) if is_shared else checkpoint.content()
            attached.load_state_dict({name: value for name, value in content.items() if name != FRESH_STREAMS})
        self._steps = steps_in(trainer.callback_handler.train_dataloader, args.gradient_accumulation_steps)
        self._loop = CustomLoop(attached, args.gradient_accumulation_steps, accelerator=None, called=None)
        attached.plan.limit = state.max_steps
        if state.global_step:
            epoch, index = divmod(state.global_step, self._steps) if self._steps else (int(state.epoch or 0), 0)
            self._loop.begin_at(epoch, state.global_step, 0 if args.ignore_data_skip else index)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Note the end of the epoch's data; the epoch ends when the next one starts, after its evaluation."""
        self._active_loop.end_of_data(self._steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **parts: Any) -> None:
        """Record what the Trainer logs; its last log ends the epoch, before the Trainer may load the best weights."""
        numbers = {name: value for name, value in (logs or {}).items() if not name.endswith(COST_SUFFIXES)}
        if "train_runtime" not in (logs or {}):
            self.attached.report_numbers(numbers, evaluates=False)
        else:
            self._active_loop.start_without_steps()
            self._active_loop.end_epoch({})
            if self.attached.is_started:
                self.attached.end_training()

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Write the hooks' states of all ranks into the Trainer's checkpoint, if all ranks see its folder."""
        trainer = self._trainer
        # Private: a search saves the checkpoints of every trial in a separate folder.
        outputs = trainer._get_output_dir(trainer._trial) if state.is_hyper_param_search else args.output_dir
        folder, task = Path(outputs) / f"checkpoint-{state.global_step}", self.attached.driver.task
        if task.ranks.agree(not folder.is_dir()):
            return
        writer, manifest = CheckpointWriter(folder / STATE, 1, task.ranks), {"step": state.global_step, "score": None}
        arrangement = {"ranks": task.ranks.arrangement(task.model)} if task.ranks.are_many else {}
        writer.write(state.global_step, self._active_loop.state_dict(), manifest | arrangement, ())
        writer.finish()
        for sentence in writer.failures():
            notice(f"{sentence} Training continues.")

    def _on_loading(self, load: Callable[..., Any], checkpoint: Any) -> Any:
        """Note the checkpoint that the Trainer resumes from."""
        self._stored = None if checkpoint is None else Path(checkpoint) / STATE
        return load(checkpoint)

    def _on_batches(self, get: Callable[..., Any], *inputs: Any) -> Any:
        """Start a step with all its micro-batches."""
        with self.attached.clock.during(DATA):
            self._parts, self._items = get(*inputs)
        if self._parts:
            self._active_loop.micro_batch(self._parts[0], self._steps, *self._parts[1:])
        return self._parts, self._items

    def _on_training_step(self, step: Callable[..., Tensor], *inputs: Any, **options: Any) -> Tensor:
        clock = self.attached.clock
        clock.enter(FORWARD)
        loss = step(*inputs, **options)
        clock.enter(OTHER)
        self._active_loop.record_loss(loss, complete=self._trainer.accelerator.gradient_state.sync_gradients)
        return loss

    def _on_backward(self, backward: Callable[..., None], loss: Tensor, **options: Any) -> None:
        """Call the hooks before the backward pass of a micro-batch; the accelerator may divide the loss itself."""
        with self.attached.hook_calls:
            self.attached.driver.before_backward(loss, divisor=self._trainer.accelerator.gradient_accumulation_steps)
        backward(loss, **options)

    def _on_evaluation(self, evaluate: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Evaluate in isolation from the run, and show the numbers to hooks."""
        attached = self.attached
        optimizers = optimizers_of(attached.manager.state) if attached.is_built else ()
        with attached.evaluating(self._trainer.model, optimizers):
            result = evaluate(*inputs, **options)
        if isinstance(result, dict) and attached.is_built:
            numbers = {name: value for name, value in result.items() if isinstance(value, (int, float))}
            attached.driver.record_evaluation(
                {name: value for name, value in numbers.items() if not name.endswith(COST_SUFFIXES)}
            )
        return result

    @property
    def _active_loop(self) -> CustomLoop:
        assert self._loop is not None
        return self._loop

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss that the Trainer would differentiate for a micro-batch of this step, or for another batch.

        Attributes of the Trainer that its methods change are restored, such as the counters of tokens that it logs.
        """
        trainer = self._trainer
        # Modules are undone with the training state; the rest are settings, data, and callbacks.
        others = (getattr(trainer, name, None) for name in NOT_COUNTERS)
        modules = [value for value in vars(trainer).values() if isinstance(value, nn.Module)]
        with undone_in_modules((), others=(vars(trainer),), excluded=(*others, *modules)):
            is_part = any(part is batch for part in self._parts)
            count = len(self._parts) if is_part else 1
            model.train()
            # Private: with these functions the Trainer itself prepares a micro-batch and counts its items.
            inputs = trainer._prepare_inputs(dict(batch))
            items = self._items if is_part else trainer._get_num_items_in_batch([batch], trainer.args.device)
            with trainer.compute_loss_context_manager():
                loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
            # The Trainer's own rule: a loss that is not scaled yet is divided by the number of micro-batches.
            scaled = trainer.loss_is_scaled_for_ga
            if scaled is None:
                takes_items = trainer.model_accepts_loss_kwargs and items is not None
                scaled = takes_items or trainer.compute_loss_func is not None
            return loss if scaled else loss / count

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Pass the numbers of ``step`` to the Trainer's logging callbacks."""
        trainer = self._trainer
        state = copy(trainer.state)
        state.global_step = step
        for callback in trainer.callback_handler.callbacks:
            if not isinstance(callback, (*NOT_LOGGERS, TrainerEvents)):
                callback.on_log(trainer.args, state, trainer.control, logs=dict(numbers), model=trainer.model)
