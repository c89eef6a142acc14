"""Attaching hooks to Lightning's Trainer, under either of the names that it is installed by."""

import sys
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import require
from ..state import Transient
from .attach_options import AttachOptions
from .attached_run import AttachedRun
from .lightning_loop import LightningLoop, check_names
from .logger_sink import through_trainer
from .scope import AttachedScope

RELIES_ON = (
    *("fit_loop._should_accumulate", "fit_loop.epoch_loop._build_kwargs", "fit_loop.epoch_loop.val_loop.run"),
    *("fit_loop.epoch_loop.val_loop._results.metrics", "precision_plugin._clip_gradients"),
)
"""What no public name of a Trainer gives."""


def attach_to(trainer: Any, choices: AttachOptions) -> AttachedScope:
    """Add a callback to a Trainer that calls the hooks; raises :class:`UsageError` where it cannot."""
    packages = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    package = next(name for name in packages if isinstance(trainer, sys.modules[name].Trainer))
    check_names(trainer, RELIES_ON)
    _refuse(trainer, package)
    Transient.register(sys.modules[package].Trainer)  # the module refers to its trainer, which is no training state

    def log(numbers: dict[str, float], step: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step)

    most = trainer.max_epochs if choices.loop == "epoch" else trainer.max_steps
    choices = through_trainer(replace(choices, length=choices.length or (most if most and most > 0 else None)), log)
    whole = "take steps of one batch: accumulate_grad_batches=1"
    lacks = choices.lacks(**({} if trainer.accumulate_grad_batches == 1 else {"needs_next_batch": whole}))
    lacks.pop("needs_loss", None)
    run = AttachedRun(choices, lacks, Path(trainer.log_dir or trainer.default_root_dir), bar=False)
    saver = import_module(f"{package}.callbacks").Checkpoint
    others = [each for each in trainer.callbacks if not isinstance(each, (LightningLoop, saver))]
    savers = [each for each in trainer.callbacks if isinstance(each, saver)]  # last, as Lightning keeps them
    trainer.callbacks = [*others, _callback_class(package)(trainer, run), *savers]
    return AttachedScope(run)


def _refuse(trainer: Any, package: str) -> None:
    """Raise :class:`UsageError` for a trainer that hooks cannot be attached to."""
    active = [each for each in trainer.callbacks if isinstance(each, LightningLoop) and not each.is_over]
    require(not active, "Hooks are attached to this Trainer already; name all of them in one attach.")
    running = trainer.state.status == "running"
    require(not running, "This Trainer is running already; attach hooks to it before trainer.fit(...).")
    remedy = "make it without to attach hooks"
    require(not trainer.barebones, f"This Trainer was made with barebones=True, which allows no callbacks; {remedy}.")
    strategies = import_module(f"{package}.strategies")
    served = strategies.SingleDeviceStrategy, strategies.DDPStrategy, strategies.ModelParallelStrategy
    kind, is_served = type(trainer.strategy).__name__, isinstance(trainer.strategy, served)
    known = "one device, to DDPStrategy ('ddp') and to ModelParallelStrategy (FSDP2)"
    require(is_served, f"This Trainer has the strategy {kind}; hooks are attached to {known}.")
    # no public name tells how it starts its processes
    spawns = vars(trainer.strategy).get("_start_method") == "spawn"
    require(not spawns, "ddp_spawn hands the Trainer on to new processes, where hooks do not follow; use 'ddp'.")


@cache
def _callback_class(package: str) -> Any:
    """Make the callback for one of the two names under which Lightning is installed."""
    return type("LoopscopeCallback", (LightningLoop, import_module(package).Callback), {"__module__": __name__})
