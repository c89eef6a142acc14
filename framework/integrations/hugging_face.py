"""Hooks in Hugging Face's Trainer: its calls told to an :class:`.CustomLoop`, its evaluation made neutral.

Tested with transformers 5.23 and accelerate 1.15. The trainer has no event before its clipping and none that shows the
batches of a step, so a few of its methods are wrapped while a run is attached.
"""

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
from ..state import Transient
from ..training import takes_closure
from .attach_options import AttachOptions, steps_in
from .attached_run import AttachedRun
from .custom_loop import CustomLoop
from .logger_sink import through_trainer
from .model_wrappers import replaced, unwrapped
from .scope import AttachedScope

TESTED = "transformers 5.23"
STATE = "loopscope"
"""The folder of the hooks' state in a checkpoint."""
RELIED_ON = (
    *("train", "training_step", "get_batch_samples", "evaluate", "predict", "compute_loss", "add_callback"),
    *("compute_loss_context_manager", "_prepare_inputs", "_get_num_items_in_batch", "_load_optimizer_and_scheduler"),
)
"""Methods of a Trainer that are wrapped or called; those with an underscore are its own affair and may change."""
OF_THE_COST = ("_runtime", "_per_second", "_time", "epoch")
"""Ends of the names of what an evaluation tells beside its numbers."""
SILENT = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
"""Callbacks that are no loggers."""

for _kind in (GradientState, AcceleratorState, PartialState, Trainer):
    Transient.register(_kind)  # reached from optimizers and schedulers that accelerate has prepared; no training state


def attach_to(trainer: Any, choices: AttachOptions) -> AttachedScope:
    """Attach hooks to a Trainer that is not training yet; raises :class:`UsageError` for one that cannot be served."""
    missing = [name for name in RELIED_ON if not callable(getattr(trainer, name, None))]
    require(not missing, f"This Trainer has no {', '.join(missing)}, which attach relies on; {TESTED} has them.")
    attached = any(isinstance(callback, TrainerEvents) for callback in trainer.callback_handler.callbacks)
    require(not attached, "A run is attached to this Trainer already; its scope is what attach returned then.")
    several = trainer.args.n_gpu > 1
    require(not several, "This Trainer trains on several devices in one process; start one for each, by torchrun.")
    first = trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2
    require(not first, "This Trainer shards its model by the first FSDP; set fsdp_version 2 to attach hooks.")
    require(not trainer.is_deepspeed_enabled, "This Trainer hands its model to DeepSpeed; use DDP, or fsdp_version 2.")
    again = trainer.args.auto_find_batch_size
    require(not again, "auto_find_batch_size begins the training anew under way; set the batch size to attach hooks.")
    lacks = {need: remedy for need, remedy in choices.lacks().items() if need != "needs_loss"}
    events = TrainerEvents(trainer)
    run = AttachedRun(through_trainer(choices, events.log), lacks, Path(trainer.args.output_dir), bar=False)
    events.run = run
    trainer.add_callback(events)
    trainer.train = wraps(trainer.train)(partial(events.training, trainer.train))  # type: ignore[method-assign]
    return AttachedScope(run)


class TrainerEvents(TrainerCallback):
    """What a Trainer tells by its events and its methods, told to an own loop."""

    run: AttachedRun

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loop: CustomLoop | None = None
        self._parts: list[Batch] = []
        self._items: Any = None
        self._steps: int | None = None
        self._stored: Path | None = None

    def training(self, train: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Return what ``train`` does, with the methods wrapped while it runs, and the run closed however it ends."""
        with self._wrapped():
            try:
                result = train(*inputs, **options)
            except BaseException as error:
                self._close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed", error)
                raise
            self._close("completed")
            return result

    @contextmanager
    def _wrapped(self) -> Iterator[None]:
        trainer = self._trainer
        around: dict[str, Callable[..., Any]] = {
            "get_batch_samples": self._getting,
            "training_step": self._stepping,
            "evaluate": self._evaluating,
            "predict": self._evaluating,
            "_load_optimizer_and_scheduler": self._loading,
        }
        with ExitStack() as held:
            for name, wrapper in around.items():
                method = getattr(trainer, name)
                held.enter_context(replaced(trainer, name, wraps(method)(partial(wrapper, method))))
            yield

    def _close(self, status: str, error: BaseException | None = None) -> None:
        if self._loop is not None:
            self._loop.close(status, error)

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Put the hooks around model and optimizer, which are what they will be by now."""
        trainer, run = self._trainer, self.run
        require(not run.is_over, "This run is over; attach again, with another out=, before the Trainer trains again.")
        optimizer, scheduler = trainer.optimizer, trainer.lr_scheduler
        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if takes_closure(optimizer):
            raise UsageError(f"{type(optimizer).__name__} takes a closure, which a Trainer does not give it.")
        wrapped = trainer.accelerator.unwrap_model(trainer.model_wrapped, keep_torch_compile=True)
        run.build(
            trainer.model,
            optimizer,
            scheduler=scheduler,
            scaler=trainer.accelerator.scaler,
            loss=self._loss,
            replica=unwrapped(trainer.model_wrapped)[1],
            accumulate=args.gradient_accumulation_steps,
            compiled=wrapped is not trainer.model,
            length=int(state.num_train_epochs if run.choices.loop == "epoch" else state.max_steps),
            scheduler_interval="step",
        )
        for path in [*checkpoint_folders(self._stored)][:1] if self._stored is not None else ():
            task, found = run.driver.task, open_checkpoint(path)
            content = read_content(found, task.model, task.ranks) if found.is_of_ranks else found.content()
            run.load_state_dict({name: value for name, value in content.items() if name != FRESH_STREAMS})
        self._steps = steps_in(trainer.callback_handler.train_dataloader, args.gradient_accumulation_steps)
        self._loop = CustomLoop(run, args.gradient_accumulation_steps, None)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Let the epoch end as the next one begins: its evaluation comes yet."""
        self._own.pass_over(self._steps)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **parts: Any) -> None:
        """End the last epoch with the last numbers of the training, before the best weights may be loaded."""
        if "train_runtime" in (logs or {}):
            self._own.end_epoch({})

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        """Write the state that the hooks have on all ranks into the checkpoint, in a folder that all ranks see."""
        folder, task = Path(args.output_dir) / f"checkpoint-{state.global_step}", self.run.driver.task
        if task.ranks.agree(not folder.is_dir()):
            return
        writer, manifest = CheckpointWriter(folder / STATE, 1, task.ranks), {"step": state.global_step, "score": None}
        arrangement = {"ranks": task.ranks.arrangement(task.model)} if task.ranks.are_many else {}
        writer.write(state.global_step, self._own.state_dict(), manifest | arrangement, ())
        writer.finish()
        for sentence in writer.failures():
            notice(f"{sentence} Training goes on.")

    def _loading(self, load: Callable[..., Any], checkpoint: Any) -> Any:
        """Note the checkpoint from which the Trainer goes on."""
        self._stored = None if checkpoint is None else Path(checkpoint) / STATE
        return load(checkpoint)

    def _getting(self, get: Callable[..., Any], *inputs: Any) -> Any:
        """Begin a step with all its micro-batches."""
        self._parts, self._items = get(*inputs)
        if self._parts:
            self._own.micro_batch(self._parts[0], self._steps, *self._parts[1:])
        return self._parts, self._items

    def _stepping(self, step: Callable[..., Tensor], *inputs: Any, **options: Any) -> Tensor:
        loss = step(*inputs, **options)
        self._own.had_backward(loss, complete=self._trainer.accelerator.gradient_state.sync_gradients)
        return loss

    def _evaluating(self, evaluate: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """Evaluate isolated from the run."""
        run = self.run
        with run.evaluating(self._trainer.model):
            found = evaluate(*inputs, **options)
        if isinstance(found, dict) and run.is_built:
            numbers = {name: value for name, value in found.items() if isinstance(value, (int, float))}
            run.driver.evaluated({name: value for name, value in numbers.items() if not name.endswith(OF_THE_COST)})
        return found

    @property
    def _own(self) -> CustomLoop:
        assert self._loop is not None
        return self._loop

    def _loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return what the Trainer would differentiate for a micro-batch of the present step, or for another batch."""
        trainer = self._trainer
        is_part = any(part is batch for part in self._parts)
        count = len(self._parts) if is_part else 1
        model.train()
        inputs = trainer._prepare_inputs(dict(batch))
        items = self._items if is_part else trainer._get_num_items_in_batch([batch], trainer.args.device)
        with trainer.compute_loss_context_manager():
            loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=items)
        scaled = trainer.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
        return loss if scaled else loss / count

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Give numbers to the callbacks that report somewhere, as of ``step``."""
        trainer = self._trainer
        state = copy(trainer.state)
        state.global_step = step
        for callback in trainer.callback_handler.callbacks:
            if not isinstance(callback, (*SILENT, TrainerEvents)):
                callback.on_log(trainer.args, state, trainer.control, logs=dict(numbers), model=trainer.model)
