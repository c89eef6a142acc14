"""Rules for experiments: for their classes, their instances, and the return values of their methods.

A rule yields each fault as the rest of a sentence that starts with the experiment or its method, and its source line.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import chain
from operator import length_hint
from traceback import walk_tb
from types import FunctionType
from typing import Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data import Loader
from ..errors import InvalidExperimentError, LoopscopeError, UsageError, listed, nearest, shortened, user_code_lines
from ..hooks import HookRegistry, TrainingHook, metric_table
from ..hooks.selection import always_on
from ..registry import where
from .config import ExperimentConfig, RunFlags, describe_type, field_names, fits, is_parsable

DATACLASS = "@dataclass(frozen=True, kw_only=True)"
EXAMPLES: dict[Any, str] = {
    Sequence[str]: ", such as ('one', 'two')",
    Mapping[str, str]: ", such as {'val_loss': 'one'}",
    Mapping[str, Sequence[str]]: ", such as {'loss': ['training_metrics/loss']}",
    Mapping[str, Mapping[str, Any]]: ", such as {'quick': {'batch_size': 8}}",
}
PARSED = "int, float, bool, str, Path, None, Literal, lists and dicts of them"
Faults = Iterator[str]


def unfit_error(experiment: Any, fault: str, method: str = "") -> InvalidExperimentError:
    """Create the error for a fault of an experiment, of its class, or of a return value of ``method``."""
    kind: Any = experiment if isinstance(experiment, type) else type(experiment)
    name = f" {_short_repr(kind.name)}" if isinstance(getattr(kind, "name", None), str) else ""
    if method:
        function = getattr(kind, method)
        place = where(kind if getattr(function, "__module__", "").startswith("loopscope.") else function)
        return InvalidExperimentError(f"{method}() of experiment{name} ({place}) {fault}")
    return InvalidExperimentError(f"Experiment{name} (class {kind.__qualname__}, {where(kind)}) {fault}")


def check_experiment(experiment: Any, base: type[Any]) -> None:
    """Raise :class:`InvalidExperimentError` for an invalid experiment or class of one; ``base`` is ExperimentRunner."""
    of_class = (_name, _attributes, _config, _methods, _options, _fields, _presets)
    of_instance = (_instance, _attributes, _names_of_strategies, _metrics)
    for rule in of_class if isinstance(experiment, type) else of_instance:
        for fault in rule(experiment, base):
            raise unfit_error(experiment, fault)


def _instance(runner: Any, _: type[Any]) -> Faults:
    """Check the config and the length of an instance."""
    if not isinstance(getattr(runner, "config", None), ExperimentConfig):
        yield "has no config after its creation; its __init__ must call super().__init__(config, device)."
    elif type(runner.length) is not int or runner.length < 1:
        yield f"has length = {runner.length!r}; it must be a number of epochs (step loop: steps), an int of at least 1."


def _name(experiment: type[Any], _: type[Any]) -> Faults:
    name = getattr(experiment, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,100}", name):
        yield f"needs a name of letters, digits and underscores, name = 'my_experiment'; it has {_short_repr(name)}."


def _attributes(owner: Any, base: type[Any]) -> Faults:
    """Check the attributes of an experiment against the annotations of the base class; properties are skipped."""
    for name, hint in get_type_hints(base).items():
        hint, value = get_args(hint)[0] if get_origin(hint) is ClassVar else hint, getattr(owner, name, None)
        computed = isinstance(owner, type) and hasattr(type(value), "__get__") and name not in ("strategies", "presets")
        if name not in ("name", "config_class") and not computed and not fits(value, hint):
            near = nearest(value, ("epoch", "step")) if isinstance(value, str) else ""
            yield f"has {name} = {_short_repr(value)}; it must be {describe_type(hint)}{EXAMPLES.get(hint, '')}.{near}"
    for strategy in owner.strategies if isinstance(owner.strategies, Sequence) else ():
        if not re.fullmatch(r"[^\s/\\,.\x00-\x1f-][^/\\,\x00-\x1f]{0,100}", strategy) or strategy == "all":
            yield f"has the strategy {strategy!r}, which cannot name a folder and be given on the command line."


def _methods(experiment: type[Any], base: type[Any]) -> Faults:
    """Check that the methods of the base class are defined and accept its arguments."""
    if missing := sorted(experiment.__abstractmethods__):
        yield f"must define {', '.join(_signature(name, getattr(experiment, name)) for name in missing)}."
    for name, expected in vars(base).items():
        if isinstance(expected, FunctionType) and (name[0] != "_" or name == "__init__"):
            function = getattr(experiment, name)
            try:
                inspect.signature(function).bind(*inspect.signature(expected).parameters)
            except TypeError:
                actual = f"{_signature(name, function)} ({where(function)})"
                options = "; further options are fields of config_class" if name == "__init__" else ""
                yield f"has {actual}; it must be def {_signature(name, expected)}{options}."


def _signature(name: str, member: Any) -> str:
    """Return the first line of a method's definition, without types."""
    return f"{name}({', '.join(inspect.signature(member).parameters)})" if callable(member) else f"{name} (a property)"


def _config(experiment: type[Any], _: type[Any]) -> Faults:
    given = getattr(experiment, "config_class", None)
    if not (isinstance(given, type) and issubclass(given, ExperimentConfig)):
        example = f"{DATACLASS} class MyConfig(ExperimentConfig)"
        yield f"has config_class = {_short_repr(given)}; it must be a class of options: {example}."


def _class(config: type[Any]) -> str:
    """Name a config class with its place, which Python reads from the whole file: only for a fault."""
    return f"config class {config.__qualname__} ({where(config)})"


def _options(experiment: type[Any], _: type[Any]) -> Faults:
    """Find attributes that are no options because they lack an annotation or their class lacks ``@dataclass``."""
    config = experiment.config_class
    for part in config.__mro__[: config.__mro__.index(ExperimentConfig)]:
        annotated = inspect.get_annotations(part)
        if "__dataclass_fields__" not in vars(part) and any("ClassVar" not in str(hint) for hint in annotated.values()):
            yield f"has the {_class(part)}, which lacks {DATACLASS} above it."
        for name in [name for name in vars(part) if name[0] != "_" and name not in annotated]:
            value, meant = vars(part)[name], name in field_names(config) or (name.islower() and is_dataclass(part))
            if meant and not (callable(value) or hasattr(type(value), "__get__")):
                typed = f"which is no option without a type: {name}: TYPE = {value!r}"
                yield f"has the {_class(part)} with {name} = {value!r}, {typed}."


def _fields(experiment: type[Any], _: type[Any]) -> Faults:
    config = experiment.config_class
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        advice = "define or import it outside of functions and TYPE_CHECKING"
        yield f"has in its {_class(config)} an unknown type: {error}; {advice}."
    for field in fields(config):
        name, hint = field.name, hints[field.name]
        if name in {*field_names(RunFlags), *vars(ExperimentConfig)} - {*field_names(ExperimentConfig)}:
            advice = "a name that every run or config already uses; rename it"
            yield f"has in its {_class(config)} the option {name!r}, {advice}."
        elif not is_parsable(hint):
            accepted = f"which the command line cannot give; use {PARSED}"
            yield f"has in its {_class(config)} the option {name!r} of type {describe_type(hint)}, {accepted}."


def _presets(experiment: type[Any], _: type[Any]) -> Faults:
    hints = {**get_type_hints(RunFlags), "device": str | None, **get_type_hints(experiment.config_class)}
    presets = experiment.presets.items()
    for preset, option, value in [(preset, *item) for preset, given in presets for item in given.items()]:
        if option not in hints:
            yield f"sets {option!r} in the preset {preset!r}, but has no such option.{nearest(str(option), hints)}"
        elif not fits(value, hints[option]):
            yield f"sets {option} to {value!r} in the preset {preset!r}; it must be {describe_type(hints[option])}."


def _names_of_strategies(runner: Any, _: type[Any]) -> Faults:
    """Find unknown strategies that an experiment names."""
    for strategy in set(runner.compared_to.values()) - set(runner.strategies):
        yield f"has {strategy!r} in compared_to, but no such strategy.{nearest(strategy, runner.strategies)}"


def _metrics(runner: Any, _: type[Any]) -> Faults:
    """Find unknown metrics that an experiment names; hooks whose metrics depend on their options are skipped."""
    hooks = {hook.name: hook for hook in HookRegistry} if always_on() else {}
    for name in chain(*runner.live_metrics.values(), *runner.progress_metrics.values(), runner.compared_metrics):
        hook, _, metric = name.partition("/")
        if hooks and hook not in hooks:
            yield f"names the metric {name!r} of the hook {hook!r}, which does not exist.{nearest(hook, hooks)}"
        elif hooks and hooks[hook].describe_metrics is TrainingHook.describe_metrics:
            columns = [info.column for info in metric_table(hooks[hook].metrics)]
            if not any(f"{metric}/".startswith(f"{column}/") for column in columns):
                yield f"names the metric {name!r}, which hook {hook!r} does not have.{nearest(metric, columns)}"


def check_numbers(runner: Any, numbers: Mapping[str, Any]) -> None:
    """Raise :class:`InvalidExperimentError` if the first evaluation lacks a number that the experiment names."""
    for name in {runner.best_metric, *runner.compared_to} - {*numbers, "val_loss"}:
        fault = f"returned {listed([*numbers], 9)}, but not {name!r}, which best_metric or compared_to names"
        raise unfit_error(runner, f"{fault}.{nearest(name, numbers)}", "evaluate")


def call_method(runner: Any, method: str, *arguments: Any) -> Any:
    """Call a method of an experiment and check its return value.

    Raises:
        InvalidExperimentError: for an invalid return value.
    """
    value = getattr(runner, method)(*arguments)
    is_number = method == "compute_loss" and type(value) is Tensor and not value.ndim
    if is_number and value.requires_grad and not value.is_complex():
        return value  # a valid loss, without further calls, since this is done at every step
    instance = object() if isinstance(value, type) else value  # a class has the methods of its instances
    if accepted := ACCEPTED[method](instance, *arguments):
        raise unfit_error(runner, f"returned {_short_repr(value)}; it must be {accepted}.", method)
    return value


def as_experiment_fault(error: BaseException) -> InvalidExperimentError | None:
    """Return an error raised below :func:`call_method` as a fault of the user's experiment, or ``None``.

    An error with lines of the user's own code in its traceback explains itself, so the result is ``None``.
    """
    # The frames of `call_method` in the traceback name the experiment and its method, at no cost while nothing fails.
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__) if frame.f_code is call_method.__code__]
    if isinstance(error, InvalidExperimentError) or not frames or user_code_lines(error):
        return error if isinstance(error, InvalidExperimentError) else None
    runner, method, reason = frames[-1]["runner"], frames[-1]["method"], shortened(str(error), 200).rstrip(".")
    is_of_loopscope = type(runner).__module__.startswith("loopscope.") or isinstance(error, LoopscopeError)
    if is_of_loopscope or not isinstance(error, Exception):
        return None
    return unfit_error(runner, f"raised {type(error).__name__}: {reason}.", method)


def _short_repr(value: object) -> str:
    return shortened(" ".join(repr(value).split()), 60)


def plain(value: Any) -> Any:
    """Return a zero-dimensional tensor, array or NumPy scalar as a Python value; in a mapping convert the values."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    scalar = isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0
    return value.item() if scalar else value


# Each of the following functions checks the return value of a method of an experiment, given with the arguments of the
# method, and returns a description of accepted values, or an empty text if the value is accepted.


def _check_model(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return "an nn.Module"
    is_trainable = any(parameter.requires_grad for parameter in model.parameters())
    return "" if is_trainable else "a model with parameters to train"


def _check_prepared_model(model: Any, _given: nn.Module, _strategy: str) -> str:
    return "" if isinstance(model, nn.Module) else "an nn.Module: the given model or another one"


def _check_optimizer(optimizer: Any, model: nn.Module) -> str:
    if not hasattr(optimizer, "param_groups"):
        return "an optimizer, such as AdamW(model.parameters())"
    of_model = {id(parameter) for parameter in model.parameters()}
    of_optimizer = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    accepted = "an optimizer of the parameters of the model that it is given: model.parameters()"
    return accepted if of_model.isdisjoint(of_optimizer) else ""


def _check_scheduler(scheduler: Any, optimizer: Any) -> str:
    if scheduler is None:
        return ""
    if not hasattr(scheduler, "step"):
        return "a scheduler with a step method, or None"
    scheduled = getattr(scheduler, "optimizer", None) or optimizer
    groups = {id(group) for group in optimizer.param_groups}
    is_given = not groups.isdisjoint(map(id, scheduled.param_groups))
    return "" if is_given else "a scheduler of the optimizer that it is given"


def _check_loader(loader: Any, _strategy: str) -> str:
    if isinstance(loader, DataLoader):
        return "a Loader, which a DataLoader becomes by loopscope.data.TorchLoader(dataloader, self.config.seed)"
    if not isinstance(loader, Loader):
        return "a Loader, such as loopscope.data.TensorLoader(tensors, batch_size, order)"
    return "" if length_hint(loader) > 0 else "a loader with batches: len() of at least 1"


def _check_loss(loss: Any, _model: nn.Module, _batch: Any) -> str:
    if not isinstance(loss, Tensor) or (torch.is_grad_enabled() and not loss.requires_grad):
        return "the loss alone, a tensor with its graph, without .item(), float(), detach() and no_grad()"
    return "one real number, such as the mean()" if loss.ndim or loss.is_complex() else ""


def _check_evaluation(numbers: Any, _model: nn.Module) -> str:
    accepted = "a dict with one number for each name, a text, such as {'val_loss': 0.5}"
    return "" if fits(plain(numbers), Mapping[str, float | bool]) else accepted


def _check_strategy_hooks(options: Any, _strategy: str) -> str:
    accepted = "a dict of options by hook, such as {'grad_clip': {'max_norm': 1.0}}"
    return "" if fits(options, Mapping[str, Mapping[str, Any]]) else accepted


def _check_stop(stop: Any, _evaluation: Mapping[str, float]) -> str:
    return "" if isinstance(plain(stop), bool) else "True or False"


ACCEPTED: dict[str, Callable[..., str]] = {
    "build_model": _check_model,
    "prepare_model": _check_prepared_model,
    "build_optimizer": _check_optimizer,
    "build_scheduler": _check_scheduler,
    "build_loader": _check_loader,
    "compute_loss": _check_loss,
    "evaluate": _check_evaluation,
    "strategy_hooks": _check_strategy_hooks,
    "should_stop": _check_stop,
}
"""The check of the return value of each method of an experiment."""


def check_device(name: str | None) -> torch.device:
    """Return the device called ``name``; ``None`` selects the accelerator if available, the CPU otherwise."""
    # Without check_available torch names the device it was built for: CUDA in its default Linux wheel, on any machine.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        known = "cpu" if accelerator is None else f"{accelerator.type}, cpu"
        raise UsageError(f"Device {name!r} cannot be used here. Known: {known}.") from error
    return device
