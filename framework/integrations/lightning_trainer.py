"""Attaching hooks to Lightning's Trainer, from ``lightning`` or ``pytorch_lightning``."""

import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import require
from ..state import Transient
from .attach_options import AttachOptions
from .attached_loop import AttachedLoop
from .lightning_loop import ONE_BATCH, LightningLoop, accumulation_scheduler, check_names
from .logger_sink import route_through_trainer
from .scope import AttachedScope

REQUIRED_NAMES = (
    *("fit_loop._should_accumulate", "fit_loop.epoch_loop._build_kwargs", "fit_loop.epoch_loop.val_loop.run"),
    *("fit_loop.epoch_loop.val_loop._results.metrics", "precision_plugin._clip_gradients"),
)
"""Private names of a Trainer that are used, as there are no public ones."""


def attach_to(trainer: Any, options: AttachOptions) -> AttachedScope:
    """Add a callback that calls the hooks to a Trainer; raise :class:`UsageError` for an unsupported Trainer."""
    packages = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    package = next(name for name in packages if isinstance(trainer, sys.modules[name].Trainer))
    check_names(trainer, REQUIRED_NAMES)
    _refuse(trainer, package)
    Transient.register(sys.modules[package].Trainer)  # the module refers to its Trainer, which is no training state

    def log(numbers: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, max(0, step - 1))  # Lightning logs the first step as step 0

    limit = trainer.max_epochs if options.loop != "step" else trainer.max_steps
    options = replace(options, length=options.length or (limit if limit and limit > 0 else None))
    options = route_through_trainer(options, log)
    scheduler = accumulation_scheduler(trainer)
    accumulates = trainer.accumulate_grad_batches > 1 or (scheduler and scheduler.going_to_accumulate_grad_batches())
    lacks = options.lacks(**({"needs_next_batch": ONE_BATCH} if accumulates else {}))
    lacks.pop("needs_loss", None)
    attached = AttachedLoop(options, lacks, Path(trainer.log_dir or trainer.default_root_dir), bar=False)
    saver = import_module(f"{package}.callbacks").Checkpoint
    others = [callback for callback in trainer.callbacks if not isinstance(callback, (LightningLoop, saver))]
    savers = [callback for callback in trainer.callbacks if isinstance(callback, saver)]  # last, as Lightning orders
    callback = _callback_class(package)(trainer, attached)
    trainer.callbacks = [*others, callback, *savers]
    scope: AttachedScope = callback.scope
    return scope


def _refuse(trainer: Any, package: str) -> None:
    """Raise :class:`UsageError` for a Trainer that hooks cannot be attached to."""
    active = [item for item in trainer.callbacks if isinstance(item, LightningLoop) and not item.scope.is_closed]
    require(not active, "Hooks are already attached to this Trainer; name all hooks in one attach.")
    running = trainer.state.status == "running" and trainer.optimizers  # which a fit creates after its set-up
    require(not running, "This Trainer is already running; attach hooks to it before trainer.fit(...).")
    advice = "omit it to attach hooks"
    require(not trainer.barebones, f"This Trainer has barebones=True, which allows no callbacks; {advice}.")
    strategies = import_module(f"{package}.strategies")
    supported = strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy
    kind, is_supported = type(trainer.strategy).__name__, isinstance(trainer.strategy, supported)
    names = "one device, DDPStrategy ('ddp') and ModelParallelStrategy (FSDP2)"
    require(is_supported, f"This Trainer has the strategy {kind}; attach supports {names}.")
    # Private: no public attribute has the method by which the strategy starts its processes.
    spawns = vars(trainer.strategy).get("_start_method") == "spawn"
    require(not spawns, "ddp_spawn moves the Trainer to new processes, where hooks cannot follow; use 'ddp'.")


@cache
def _callback_class(package: str) -> Any:
    """Return the callback class for one of the two packages of Lightning."""
    return type("LoopscopeCallback", (LightningLoop, import_module(package).Callback), {"__module__": __name__})
