"""Attaching hooks to an existing training: a custom loop, or a Trainer of Hugging Face or Lightning."""

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from ..combined_optimizers import CombinedOptimizer, single_scheduler
from ..data import Batch
from ..errors import require
from ..hooks import HookRegistry, LoopType, MetricSink, SinkRegistry, StepSchedule
from ..observing import optimizers_over
from ..preserved_streams import preserved_streams
from ..training import Ranks, takes_closure
from .argument_checks import check_scheduler, with_checked_names
from .attach_options import AttachArguments, AttachOptions, DisplayMode, HookChoice, HookGroup, StopOn
from .attached_loop import AttachedLoop
from .custom_loop import CustomLoop
from .given_data import GivenData
from .model_wrappers import unwrap, unwrap_fabric
from .scope import AttachedScope, Scope, WaitingScope
from .trainers import HuggingFaceTrainer, LightningTrainer


@overload
def attach(
    target: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
    accelerator: Any = None,
    accumulate: int = 1,
    ranks: Ranks | None = None,
    **options: Unpack[AttachArguments],
) -> Scope: ...
@overload
def attach(target: HuggingFaceTrainer | LightningTrainer, **options: Unpack[AttachArguments]) -> AttachedScope: ...
@with_checked_names
def attach(
    target: Any,
    optimizer: Any = None,
    *,
    hooks: Sequence[HookChoice] | None = None,
    with_hooks: HookGroup | None = None,
    hook_options: Mapping[str, Mapping[str, Any]] | None = None,
    schedules: Mapping[str, StepSchedule] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    accelerator: Any = None,
    accumulate: int = 1,
    ranks: Ranks | None = None,
    loss: Callable[[nn.Module, Batch], Tensor] | None = None,
    loader: "GivenData | None" = None,
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None,
    also: Mapping[str, nn.Module] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    sinks: Sequence[str | MetricSink] = ("jsonl",),
    loop: LoopType | None = None,
    length: int | None = None,
    log_every: int = 100,
    snapshot_every: int | None = None,
    digest_every: int | None = None,
    seed: int = 0,
    audit: bool = False,
    check_every_call: bool = False,
    on_hook_error: Literal["raise", "skip", "auto"] = "auto",
    profile_hooks: bool = False,
    guardian_device: str | None = None,
    hook_offload_state: bool = False,
    display: DisplayMode = "brief",
    stop_after: int | None = None,
    stop_on: StopOn | None = None,
    reference: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    isolate_evaluation: bool = True,
    budget: float | str | Path | None = 0.05,
    compiled: Literal["safe", "all"] = "safe",
) -> AttachedScope:
    """Attach hooks to an existing training, without changing a bit of it; return its :class:`Scope`.

    For a Trainer, which calls the hooks itself, the result is an :class:`AttachedScope`.

    Args:
        target: the model, a ``transformers.Trainer`` or a ``lightning.Trainer``; a Trainer needs no further arguments.
        optimizer: the optimizer that trains the model, or a list of several that each train a part of it. POST_STEP
            follows the step of the last of them. Without it, the optimizers over the model's parameters that exist now,
            or at the first training pass, are used.
        hooks: hooks by name, class or instance; ``[]`` without ``with_hooks`` attaches none but ``training_metrics``.
        with_hooks: a group of hooks: ``health`` (the default without ``hooks``), ``observers``, ``interventions``,
            ``full``, ``minimal``.
        hook_options: options by the name of the hook.
        schedules: the steps at which hooks fire, by the name of the hook.
        scheduler: the learning-rate scheduler, which is rolled back with the rest of the training state, or a list of
            several.
        scaler: the ``GradScaler`` of the loop; hooks see the unscaled gradients.
        accelerator: the Accelerator that runs backward in a loop of Accelerate; its scaler is used.
        accumulate: the number of micro-batches per step.
        ranks: the ranks that train together, if the model does not show it: ``Ranks(data=[group])`` if the loop itself
            averages the gradients over a process group, ``Ranks()`` if every process trains a separate model.
        loss: ``loss(model, batch)`` returns the argument of :meth:`Scope.backward`, for hooks that compute losses.
        loader: the training data, for hooks that read them; such hooks use a separate order. A DataLoader, a list of
            batches, or a function without arguments that returns a batch.
        evaluate: ``evaluate(model)`` returns named numbers, for hooks that evaluate other weights.
        also: further modules that ``loss`` or ``evaluate`` use, by name, such as ``{"discriminator": discriminator}``:
            hooks leave them unchanged too. Those that ``loss`` uses are also found without this argument, if a hook
            computes losses.
        out: the folder of the run; by default ``loopscope-runs/run_N``, with the next free number, in the current
            folder or in that of the Trainer.
        overwrite: replace a run in the folder; if this program has left that run open, it is closed first.
        sinks: the destinations of metrics, by name (``jsonl``, ``csv``, ``tensorboard``, ``wandb``, ``mlflow``,
            ``trackio``, for a trainer also ``trainer``) or as objects.
        loop: whether the loop counts epochs (``epoch``) or steps (``step``), which decides where hooks fire; by default
            epochs in a Trainer and in a loop over ``scope.batches(loader)``, otherwise steps.
        length: the number of epochs or steps of the complete training, if known.
        log_every: steps between deliveries of step metrics.
        snapshot_every: epochs (default 1) or steps (default 1,000) between two SNAPSHOTs.
        digest_every: steps between two digests of the training state in the record; 0 for none. By default every
            SNAPSHOT, the last step, and the steps 1, 10 and 100 have one.
        seed: the seed of the hooks' random streams.
        audit: compare every byte of the training state before and after every call of a hook.
        check_every_call: check each call of loopscope's own hooks alone, not several together, so that an error names
            a single hook.
        on_hook_error: ``raise`` ends the training at the first named hook that raises, ``skip`` continues without it,
            ``auto`` does so unless it commits. Hooks of a group are always left out. The error is in a warning.
        profile_hooks: write the time and memory of every hook to ``summary.json``.
        guardian_device: the device of the copies that undo interventions; by default that of the originals.
        hook_offload_state: keep the state of hooks on the CPU between their calls.
        display: ``brief`` shows a line at the start, each finding, and the diagnosis at the end, ``normal`` also loss,
            learning rate and evaluations, ``verbose`` also tables of all newest metrics, ``silent`` a progress bar and
            warnings, ``none`` nothing.
        stop_after: the number of steps after which the program ends, with status 0.
        stop_on: end the program, with status 3, between two steps as soon as the doctor reports a ``critical`` finding,
            or a number that is not finite (``nonfinite``).
        reference: a file of weights, saved as a state dict, for hooks that measure against a reference solution.
        config: a description of the training for the record, as plain values.
        isolate_evaluation: undo the side effects of evaluations (random numbers, modes, buffers, swapped weights), so
            that they do not change the training; ``False`` keeps them, as in the script without loopscope.
        budget: the bound on the CPU time of the hooks of ``with_hooks``, as a share of the training's (``0.05`` or
            ``"5%"``), which thins their schedules; ``None`` leaves these as they are, and the folder of a run repeats
            its schedules. Hooks with an entry in ``schedules`` are not thinned.
        compiled: what to do with taps in graphs of ``torch.compile`` that change the last bits of the training, which a
            comparison of every graph's first pass shows: ``safe`` leaves them out, ``all`` keeps them and lists the run
            as treated.

    Raises:
        UsageError: for a training or an argument that attach does not support; the message says what to do.
        RankLostError: if other ranks do not call attach.
    """
    given = locals()
    if hooks is None and with_hooks is None:
        given["with_hooks"] = "health"
    given["audit_hooks"] = audit
    given["reference"] = Path(reference) if isinstance(reference, str) else reference
    chosen = {name: given[name] for name in AttachOptions.__dataclass_fields__ if given[name] is not None}
    chosen["budget"] = budget  # None has a meaning
    with preserved_streams():  # importing plug-ins and creating hooks may draw random numbers
        return _attach(target, chosen, given)


def _attach(target: Any, chosen: Mapping[str, Any], given: Mapping[str, Any]) -> AttachedScope:
    """Attach hooks to a Trainer or a custom loop; ``given`` has all arguments of :func:`attach`."""
    for package in ("training_hooks", "sinks"):
        import_module(f"loopscope.{package}")
    HookRegistry.discover()
    SinkRegistry.discover()
    options = AttachOptions(**chosen)
    if trainer := _trainer_module(target):
        own_parts = ("optimizer", "scheduler", "scaler", "accelerator", "ranks")
        surplus = [name for name in own_parts if given[name] is not None]
        require(not surplus, f"The trainer has its own {' and '.join(surplus)}; give attach the trainer alone.")
        scope: AttachedScope = import_module(f"{__package__}.{trainer}").attach_to(target, options)
        return scope
    require(
        not isinstance(target, nn.DataParallel),
        "DataParallel trains on several devices in one process, but attach supports one device; use "
        "DistributedDataParallel.",
    )
    require(
        isinstance(target, nn.Module),
        f"attach was given a {type(target).__name__}; it takes a model and its optimizer, a transformers.Trainer, or a "
        "lightning.Trainer.",
    )
    names = ("optimizer", "scheduler", "scaler", "accelerator", "accumulate", "ranks")
    return _attach_to_loop(target, options=options, **{name: given[name] for name in names})


def _trainer_module(target: Any) -> str:
    """Return the module name for a Trainer, or an empty string for other targets."""
    # Without an import of a trainer library the target cannot be one of its objects, so none is imported here.
    if (trainers := sys.modules.get("transformers.trainer")) and isinstance(target, trainers.Trainer):
        return "hugging_face"
    names = ("lightning.pytorch", "pytorch_lightning")
    kinds = tuple(sys.modules[name].Trainer for name in names if name in sys.modules)
    return "lightning_trainer" if isinstance(target, kinds) else ""


def _attach_to_loop(
    target: nn.Module,
    optimizer: Any,
    options: AttachOptions,
    scheduler: Any,
    scaler: Any,
    accelerator: Any,
    accumulate: int,
    ranks: Ranks | None,
) -> Scope:
    if accelerator is not None:
        message = "An Accelerator has its own scaler and number of micro-batches; leave scaler= and accumulate= out."
        require(scaler is None and accumulate == 1, message)
        scaler, accumulate = accelerator.scaler, accelerator.gradient_accumulation_steps
    is_ranks = ranks is None or isinstance(ranks, Ranks)
    require(is_ranks, f"ranks is a {type(ranks).__name__}; give loopscope.training.Ranks(data=[process_group]).")
    is_count = type(accumulate) is int and accumulate >= 1
    require(is_count, f"accumulate is {accumulate!r}; it must be the number of micro-batches in a step, at least 1.")
    target = unwrap_fabric(target)
    missing = {} if accumulate == 1 else {"needs_next_batch": "take steps of one batch: accumulate=1"}
    attached = AttachedLoop(options, options.lacks(**missing))

    def observe(optimizer: Any) -> CustomLoop:
        items = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
        single = _single_optimizer([unwrap_fabric(item) for item in items])
        given = {"scaler": scaler, "scheduler": _given_scheduler(scheduler, single)}
        fits = scaler is None or isinstance(scaler, GradScaler)
        require(fits, f"The scaler is a {type(scaler).__name__}; give the loop's own scaler, or leave scaler= out.")
        model, replica, compiled = unwrap(target)
        parts = {**given, "replica": replica, "compiled": compiled}
        attached.build(model, single, **parts, ranks=ranks, accumulate=accumulate)
        return CustomLoop(attached, accumulate, accelerator, target)

    if optimizer is None:
        optimizer = optimizers_over(target.parameters()) or None
    if optimizer is not None:
        return Scope(attached, observe(optimizer), accumulate)
    return WaitingScope(attached, target, observe, accumulate)


def _single_optimizer(given: Sequence[Any]) -> Any:
    """Return the only optimizer, or the :class:`.CombinedOptimizer` of several, without the wrappers of Accelerate."""
    items = [_without_wrapper(item, "optimizer") for item in given]
    require(bool(items), "The list of optimizers is empty; give attach(model, [first, second]) each optimizer.")
    trained: dict[int, str] = {}
    for item in items:
        kind = type(item).__name__
        is_optimizer = isinstance(item, Optimizer)
        advice = "attach(model, optimizer) takes an optimizer of torch, or a list of several"
        require(is_optimizer, f"The optimizer is a {kind}; {advice}.")
        _require_step_hooks(item)
        parameters = {id(parameter): kind for group in item.param_groups for parameter in group["params"]}
        shared = next((trained[key] for key in parameters if key in trained), None)
        message = f"{shared} and {kind} train the same parameter; give every parameter to one optimizer."
        require(shared is None, message)
        require(len(items) == 1 or not takes_closure(item), f"{kind} takes a closure; attach to it alone.")
        trained |= parameters
    return items[0] if len(items) == 1 else CombinedOptimizer(items)


def _require_step_hooks(optimizer: Optimizer) -> None:
    """Raise :class:`UsageError` for an optimizer that does not call hooks on its steps, such as some wrappers."""
    # torch prepares both in Optimizer.__init__, which wrappers around an optimizer often do not call.
    calls_hooks = getattr(type(optimizer).step, "hooked", False)
    keeps_hooks = isinstance(vars(optimizer).get("_optimizer_step_pre_hooks"), OrderedDict)
    kind = type(optimizer).__name__
    wrapped = [
        f"{name} ({type(item).__name__})" for name, item in vars(optimizer).items() if isinstance(item, Optimizer)
    ]
    advice = f"give attach the optimizer in its attribute {wrapped[0]}, or " if wrapped else ""
    require(
        bool(calls_hooks and keeps_hooks),
        f"{kind}.step does not call hooks, since {kind}.__init__ does not call that of torch.optim.Optimizer; {advice}"
        f"call super().__init__() in {kind}.",
    )


def _given_scheduler(given: Any, optimizer: Any) -> Any:
    """Return the scheduler, or one object of several, without the wrappers of Accelerate."""
    items = given if isinstance(given, (list, tuple)) else [given]
    for item in items:
        check_scheduler(_without_wrapper(item, "scheduler"), optimizer)
    return single_scheduler([_without_wrapper(item, "scheduler") for item in items if item is not None])


def _without_wrapper(item: Any, name: str) -> Any:
    """Return the optimizer or scheduler in a wrapper of Accelerate; any other object unchanged."""
    # Recognised by its module, so that Accelerate is not imported.
    return vars(item)[name] if type(item).__module__ == f"accelerate.{name}" else item
