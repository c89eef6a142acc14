"""Attaching hooks to a training that already exists: a loop of one's own, or a trainer of Hugging Face or Lightning."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..data import Batch, Loader
from ..errors import UsageError, require
from ..hooks import HookRegistry, LoopType, MetricSink, SinkRegistry, StepSchedule
from ..preserved_streams import preserved_streams
from ..training import Ranks, takes_closure
from .attach_options import AttachOptions, OnError, Shown, Wanted
from .attached_run import AttachedRun
from .custom_loop import CustomLoop
from .model_wrappers import unwrapped
from .scope import Scope


def attach(
    target: Any,
    optimizer: Any = None,
    *,
    hooks: Sequence[Wanted] = (),
    with_hooks: str | None = None,
    hook_options: Mapping[str, Mapping[str, Any]] | None = None,
    schedules: Mapping[str, StepSchedule] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    accelerator: Any = None,
    accumulate: int = 1,
    ranks: Ranks | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    loader: "Loader | DataLoader[Any] | None" = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    sinks: Sequence[str | MetricSink] = ("jsonl",),
    loop: LoopType = "epoch",
    length: int | None = None,
    log_every: int = 100,
    snapshot_every: int | None = None,
    seed: int = 0,
    audit: bool = False,
    on_hook_error: OnError = "raise",
    display: Shown = "normal",
    reference: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Attach hooks to a training that already exists, without changing a bit of it; return its :class:`Scope`.

    Args:
        target: the model, or a ``transformers.Trainer``, or a ``lightning.Trainer``; the last two need nothing more.
        optimizer: the optimizer that trains the model.
        hooks: by name, class or instance.
        with_hooks: a group of them: ``observers``, ``interventions``, ``full``, ``minimal``.
        hook_options: options by the name of the hook.
        schedules: at which steps hooks fire, by the name of the hook.
        scheduler: of the learning rate, to be rolled back with the rest.
        scaler: the ``GradScaler`` of the loop; hooks see the gradients unscaled.
        accelerator: the Accelerator that runs backward, in a loop of Accelerate's; it knows the scaler.
        accumulate: micro-batches in a step.
        ranks: who trains together where the model does not tell it: ``Ranks(data=[group])`` if the loop averages the
            gradients over a process group by itself, ``Ranks()`` if every process trains a model of its own.
        loss: ``loss(model, batch)``, what :meth:`Scope.backward` is given for a batch: for hooks that compute losses.
        loader: the training data, for hooks that read them; they have an order of their own.
        evaluate: ``evaluate(model)`` returns named numbers, for hooks that evaluate other weights.
        out: the folder of the run; by default ``loopscope-runs/run_N``, with the next free number, in the current
            folder or in that of the trainer.
        overwrite: write over the run that lies in the folder; one that this program has left open there is closed.
        sinks: where metrics go, by name (``jsonl``, ``csv``, ``tensorboard``, ``wandb``) or as objects.
        loop: whether epochs are counted (``epoch``) or steps (``step``), which decides where hooks fire.
        length: epochs, or steps, of the whole training, if they are known.
        log_every: steps after which metrics of steps are delivered; in the step loop also over which means are taken.
        snapshot_every: epochs (default 1) or steps (default 1,000) between two SNAPSHOTs.
        seed: of the random streams of hooks.
        audit: compare every byte of the training state before and after every call of a hook.
        on_hook_error: ``raise`` ends the training at the first hook that raises, ``skip`` goes on without that hook.
        display: ``normal`` shows what the command shows, ``silent`` a bar and what was warned of, ``none`` nothing.
        reference: a file of weights, saved as a state dict, for hooks that measure against a reference solution.
        config: what the record is to say of the training, as plain values.

    Raises:
        UsageError: for what cannot be attached, or protected, in a sentence that says what to do.
        RankLostError: where other ranks do not attach hooks as well.
    """
    given = locals()
    chosen = {name: given[name] for name in AttachOptions.__dataclass_fields__ if given[name] is not None}
    with preserved_streams():  # plug-ins are imported, hooks are made, and a plain loop's run is built
        return _attach(target, chosen, given)


def _attach(target: Any, chosen: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """Attach hooks to the kind of training that ``target`` is; ``given`` are all arguments of :func:`attach`."""
    for package in ("training_hooks", "sinks"):
        import_module(f"loopscope.{package}")
    HookRegistry.discover()
    SinkRegistry.discover()
    choices = AttachOptions(**chosen)
    if trainer := _trainer_of(target):
        own = [name for name in ("optimizer", "scheduler", "scaler", "accelerator", "ranks") if given[name] is not None]
        require(not own, f"The trainer has its own {' and '.join(own)}; give attach the trainer alone.")
        return import_module(f"{__package__}.{trainer}").attach_to(target, choices)
    require(
        not isinstance(target, nn.DataParallel),
        "DataParallel trains on several devices in one process, where attach serves one; use DistributedDataParallel.",
    )
    require(
        isinstance(target, nn.Module),
        f"attach was given a {type(target).__name__}; it takes a model and its optimizer, a transformers.Trainer, or a "
        "lightning.Trainer.",
    )
    names = ("optimizer", "scheduler", "scaler", "accelerator", "accumulate", "ranks")
    return _to_a_loop(target, choices=choices, **{name: given[name] for name in names})


def _trainer_of(target: Any) -> str:
    """Name the module for a trainer, whose library is imported already if the target is one of its."""
    if "transformers" in sys.modules and isinstance(target, import_module("transformers").Trainer):
        return "hugging_face"
    names = ("lightning.pytorch", "pytorch_lightning")
    kinds = tuple(sys.modules[name].Trainer for name in names if name in sys.modules)
    return "lightning_trainer" if isinstance(target, kinds) else ""


def _to_a_loop(
    target: nn.Module,
    optimizer: Any,
    choices: AttachOptions,
    scheduler: Any,
    scaler: Any,
    accelerator: Any,
    accumulate: int,
    ranks: Ranks | None,
) -> Scope:
    if accelerator is not None:
        require(scaler is None and accumulate == 1, "An Accelerator has its scaler and counts micro-batches by itself.")
        scaler, accumulate = accelerator.scaler, accelerator.gradient_accumulation_steps
        from accelerate.optimizer import AcceleratedOptimizer
        from accelerate.scheduler import AcceleratedScheduler

        if isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        if isinstance(scheduler, AcceleratedScheduler):
            scheduler = scheduler.scheduler
    known = ranks is None or isinstance(ranks, Ranks)
    require(known, f"ranks is a {type(ranks).__name__}; give loopscope.training.Ranks(data=[process_group]).")
    counts = type(accumulate) is int and accumulate >= 1
    require(counts, f"accumulate is {accumulate!r}; it is the number of micro-batches in a step, at least 1.")
    kind, is_one = type(optimizer).__name__, isinstance(optimizer, Optimizer)
    require(is_one, f"The optimizer is a {kind}; attach(model, optimizer) takes one of torch's.")
    for name, given, of in (("scaler", scaler, GradScaler), ("scheduler", scheduler, object)):
        fits = given is None or (isinstance(given, of) and not isinstance(given, Optimizer))
        require(fits, f"The {name} is a {type(given).__name__}; give the loop's own {name}, or leave {name}= out.")
    if takes_closure(optimizer):
        raise UsageError(
            f"{kind} evaluates the loss within its step, where hooks cannot follow a loop of your own; train it in an "
            "experiment, or with an optimizer that takes no closure."
        )
    whole = {} if accumulate == 1 else {"needs_next_batch": "take steps of one batch: accumulate=1"}
    run = AttachedRun(choices, choices.lacks(**whole))
    model, replica, compiled = unwrapped(target)
    parts = {"scheduler": scheduler, "scaler": scaler, "replica": replica, "compiled": compiled}
    run.build(model, optimizer, **parts, ranks=ranks, accumulate=accumulate)
    return Scope(run, CustomLoop(run, accumulate, accelerator), accumulate)
