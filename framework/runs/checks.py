"""What an experiment must be: rules for its class, for an instance, and for what its methods return.

A rule says what is wrong as the rest of a sentence, which begins with the experiment or its method, and the place.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import chain
from operator import length_hint
from traceback import walk_tb
from types import FunctionType
from typing import Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..data import Loader
from ..errors import LoopscopeError, UnfitError, UsageError, listed, nearest, passed_through_users_code, shortened
from ..hooks import HookRegistry, TrainingHook, always_on, hook_options, metric_table
from ..registry import where
from .config import ExperimentConfig, RunFlags, field_names, fits, in_words, is_parsed

DATACLASS = "@dataclass(frozen=True, kw_only=True)"
EXAMPLES: dict[Any, str] = {
    Sequence[str]: ", such as ('one', 'two')",
    Mapping[str, str]: ", such as {'val_loss': 'one'}",
    Mapping[str, Sequence[str]]: ", such as {'loss': ['training_metrics/loss']}",
    Mapping[str, Mapping[str, Any]]: ", such as {'quick': {'batch_size': 8}}",
}
PARSED = "int, float, bool, str, Path, None, Literal, lists and dicts of them"
Faults = Iterator[str]


def unfit(experiment: Any, fault: str, method: str = "") -> UnfitError:
    """Make the error for a fault of an experiment, of its class, or of what one of its methods returns."""
    kind: Any = experiment if isinstance(experiment, type) else type(experiment)
    name = f" {_shown(kind.name)}" if isinstance(getattr(kind, "name", None), str) else ""
    if method:
        own = getattr(kind, method)
        place = where(kind if getattr(own, "__module__", "").startswith("loopscope.") else own)
        return UnfitError(f"{method}() of experiment{name} ({place}) {fault}")
    return UnfitError(f"Experiment{name} (class {kind.__qualname__}, {where(kind)}) {fault}")


def check_experiment(experiment: Any, base: type[Any]) -> None:
    """Raise :class:`UnfitError` for an experiment, or its class, that could not work; ``base`` is ExperimentRunner."""
    of_class = (_name, _statements, _config, _methods, _options, _fields, _presets)
    for rule in of_class if isinstance(experiment, type) else (_made, _statements, _references, _metrics):
        for fault in rule(experiment, base):
            raise unfit(experiment, fault)


def _made(runner: Any, _: type[Any]) -> Faults:
    if not isinstance(getattr(runner, "config", None), ExperimentConfig):
        yield "has no config once it is made; its __init__ must call super().__init__(config, device)."
    elif type(runner.length) is not int or runner.length < 1:
        yield f"has length = {runner.length!r}; it is the number of epochs (step loop: steps), an int of 1 or more."


def _name(experiment: type[Any], _: type[Any]) -> Faults:
    name = getattr(experiment, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"\w{1,100}", name):
        yield f"needs a name of letters, digits and underscores, name = 'my_experiment'; it has {_shown(name)}."


def _statements(owner: Any, base: type[Any]) -> Faults:
    """Compare what an experiment says of itself with the annotations of the base class; properties are left out."""
    for name, hint in get_type_hints(base).items():
        hint, value = get_args(hint)[0] if get_origin(hint) is ClassVar else hint, getattr(owner, name, None)
        computed = isinstance(owner, type) and hasattr(type(value), "__get__") and name not in ("strategies", "presets")
        if name not in ("name", "config_class") and not computed and not fits(value, hint):
            near = nearest(value, ("epoch", "step")) if isinstance(value, str) else ""
            yield f"has {name} = {_shown(value)}; it must be {in_words(hint)}{EXAMPLES.get(hint, '')}.{near}"
    for place, strategy in enumerate(strategies := owner.strategies if isinstance(owner.strategies, Sequence) else ()):
        if not re.fullmatch(r"[^\s/\\,.\x00-\x1f-][^/\\,\x00-\x1f]{0,100}", strategy) or strategy == "all":
            yield f"has the strategy {strategy!r}, which cannot be the name of a folder and a word of the command line."
        if strategy.replace("-", "_") in [other.replace("-", "_") for other in strategies[:place]]:
            yield f"has the strategy {strategy!r} twice (dashes and underscores are the same); rename one."
    if owner.strategies in ((), []):
        yield "has no strategies; even a single one has a name: strategies = ('plain',)."


def _methods(experiment: type[Any], base: type[Any]) -> Faults:
    """Compare the methods with those of the base class: are they there, can they be called so?"""
    if missing := sorted(experiment.__abstractmethods__):
        yield f"must define {', '.join(_form(name, getattr(experiment, name)) for name in missing)}."
    for name, wanted in vars(base).items():
        own = inspect.getattr_static(experiment, name)
        if isinstance(wanted, property) and isinstance(own, FunctionType):
            yield f"has {name} as a method ({where(own)}); put @property above it."
        elif isinstance(wanted, FunctionType) and own is not wanted and (name[0] != "_" or name == "__init__"):
            function, given = getattr(own, "__func__", own), [*inspect.signature(wanted).parameters]
            if not _takes(function, given[not isinstance(own, (FunctionType, classmethod)) :]):
                said = _form(name, function) if callable(function) else f"{name} = {_shown(own)}"
                options = "; options of its own are fields of config_class" if name == "__init__" else ""
                yield f"has {said} ({where(function)}); it must be def {_form(name, wanted)}{options}."


def _form(name: str, member: Any) -> str:
    """Return a method as its definition begins, without types."""
    return f"{name}({', '.join(inspect.signature(member).parameters)})" if callable(member) else f"{name} (a property)"


def _takes(function: Any, given: Iterable[str]) -> bool:
    try:
        bound = callable(function) and inspect.signature(function).bind(*given)
        return bool(bound) and not inspect.iscoroutinefunction(function)
    except TypeError:
        return False
    except ValueError:  # it is made in C, and has no signature
        return True


def _config(experiment: type[Any], _: type[Any]) -> Faults:
    given = getattr(experiment, "config_class", None)
    variables = chain(*(get_args(of) for base in experiment.__mro__ for of in getattr(base, "__orig_bases__", ())))
    bounds = [each.__bound__ for each in variables if isinstance(each, TypeVar)]
    for bound in [bound for bound in bounds if isinstance(bound, type) and issubclass(bound, ExperimentConfig)]:
        if not (isinstance(given, type) and issubclass(given, bound)):
            how = f"{DATACLASS} class MyConfig({bound.__name__})"
            yield f"has config_class = {_shown(given)}; it must be a class of options: {how}."


def _options(experiment: type[Any], _: type[Any]) -> Faults:
    """Find what was meant for an option and is none, since only what a dataclass annotates is."""
    config = experiment.config_class
    for part in config.__mro__[: config.__mro__.index(ExperimentConfig)]:
        of, annotated = f"has the config class {part.__qualname__} ({where(part)})", inspect.get_annotations(part)
        if "__dataclass_fields__" not in vars(part) and any("ClassVar" not in str(hint) for hint in annotated.values()):
            yield f"{of}, which lacks {DATACLASS} above it."
        for name in [name for name in vars(part) if name[0] != "_" and name not in annotated]:
            value, meant = vars(part)[name], name in field_names(config) or (name.islower() and is_dataclass(part))
            if meant and not (callable(value) or hasattr(type(value), "__get__")):
                yield f"{of} with {name} = {value!r}, which sets no option without a type: {name}: TYPE = {value!r}."


def _fields(experiment: type[Any], _: type[Any]) -> Faults:
    config = experiment.config_class
    of = f"has in its config class {config.__qualname__} ({where(config)})"
    try:
        hints = get_type_hints(config)
    except (NameError, TypeError, SyntaxError, AttributeError) as error:
        yield f"{of} a type that cannot be found: {error}; define or import it outside of functions and TYPE_CHECKING."
    for field in fields(config):
        name, hint = field.name, hints[field.name]
        if name in {*field_names(RunFlags), *vars(ExperimentConfig)} - {*field_names(ExperimentConfig)}:
            yield f"{of} the option {name!r}, a name that every run or config has already; rename it."
        elif name[0] == "_" or not field.init:
            yield f"{of} the field {name!r}, which cannot be given as an option; make it a property."
        elif not is_parsed(hint):
            yield f"{of} the option {name!r} of type {in_words(hint)}, which no command line can give; use {PARSED}."
        elif field.default is not MISSING and not fits(field.default, hint):
            yield f"{of} {name} = {field.default!r}; it must be {in_words(hint)}."


def _presets(experiment: type[Any], _: type[Any]) -> Faults:
    hints = {**get_type_hints(RunFlags), "device": str | None, **get_type_hints(experiment.config_class)}
    presets = experiment.presets.items()
    for preset, option, value in [(preset, *item) for preset, given in presets for item in given.items()]:
        if option not in hints:
            yield f"sets {option!r} in the preset {preset!r}, but has no such option.{nearest(str(option), hints)}"
        elif not fits(value, hints[option]):
            yield f"sets {option} to {value!r} in the preset {preset!r}; it must be {in_words(hints[option])}."


def _references(runner: Any, _: type[Any]) -> Faults:
    """Find strategies, hooks and their options that an experiment names and that do not exist."""
    for strategy in set(runner.compared_to.values()) - set(runner.strategies):
        yield f"has {strategy!r} in compared_to, but no such strategy.{nearest(strategy, runner.strategies)}"
    if not fits(runner.hook_sets, Mapping[str, Sequence[str]]):
        yield f"has hook_sets {_shown(runner.hook_sets)}; it must be a dict of lists, such as {{'mine': ['norms']}}."
    given = [pair for each in runner.strategies for pair in asked(runner, "strategy_hooks", each).items()]
    hooks = {hook.name: hook for hook in HookRegistry} if always_on() else {}  # else they were not imported
    for name in [*dict(given), *runner.minimal_hooks] if hooks else ():
        if name not in hooks:
            yield f"names the hook {name!r}, which does not exist.{nearest(name, hooks)}"
    for hook, option, value in [(hook, *item) for hook, options in given for item in options.items() if hooks]:
        if option not in (known := hook_options(hooks[hook])):
            yield f"gives hook {hook!r} the option {option!r}, which it does not have.{nearest(option, known)}"
        elif not fits(value, hint := known[option].annotation):
            yield f"gives hook {hook!r} {option} = {value!r}; it must be {in_words(hint)}."


def _metrics(runner: Any, _: type[Any]) -> Faults:
    """Find metrics that an experiment names and that no hook has, unless the hook's metrics depend on its options."""
    hooks = {hook.name: hook for hook in HookRegistry} if always_on() else {}
    for name in chain(*runner.live_metrics.values(), *runner.progress_metrics.values(), runner.compared_metrics):
        hook, _, metric = name.partition("/")
        if hooks and hook not in hooks:
            yield f"names the metric {name!r}, but there is no hook {hook!r}.{nearest(hook, hooks)}"
        elif hooks and hooks[hook].describe_metrics is TrainingHook.describe_metrics:
            columns = [info.column for info in metric_table(hooks[hook].metrics)]
            if not any(f"{metric}/".startswith(f"{column}/") for column in columns):
                yield f"names the metric {name!r}, which hook {hook!r} does not have.{nearest(metric, columns)}"


def check_numbers(runner: Any, numbers: Mapping[str, Any]) -> None:
    """Raise :class:`UnfitError` if the first evaluation lacks a number that the experiment names."""
    for name in {runner.best_metric, *runner.compared_to} - {*numbers, "val_loss"}:
        said = f"returned {listed([*numbers], 9)}, but not {name!r}, which best_metric or compared_to names"
        raise unfit(runner, f"{said}.{nearest(name, numbers)}", "evaluate")


def asked(runner: Any, method: str, *arguments: Any) -> Any:
    """Call a method of an experiment and return what it returns; raises :class:`UnfitError` for what is of no use."""
    value = getattr(runner, method)(*arguments)
    if method == "compute_loss" and _is_plain_loss(value):
        return value
    for rule, wanted in RETURNED[method]:
        if isinstance(value, type) or not rule(value, *arguments):
            raise unfit(runner, f"returned {_shown(value)}; it must be {wanted}.", method)
    return value


def _is_plain_loss(value: Any) -> bool:
    """Return whether a loss is as nearly all are, by which all rules for it hold: it is computed at every step."""
    return type(value) is Tensor and value.requires_grad and not value.ndim and value.is_floating_point()


def blamed(error: BaseException) -> UnfitError | None:
    """Return an error that was raised where a method was asked, as a fault of a user's experiment, if it is one.

    It is not one where lines of the user's own code tell what happened.
    """
    frames = [frame.f_locals for frame, _ in walk_tb(error.__traceback__) if frame.f_code is asked.__code__]
    if isinstance(error, UnfitError) or not frames or passed_through_users_code(error):
        return error if isinstance(error, UnfitError) else None
    runner, method, told = frames[-1]["runner"], frames[-1]["method"], shortened(str(error), 200).rstrip(".")
    if type(runner).__module__.startswith("loopscope.") or isinstance(error, LoopscopeError):
        return None
    return unfit(runner, f"raised {type(error).__name__}: {told}.", method) if isinstance(error, Exception) else None


def _shown(value: object) -> str:
    return shortened(" ".join(repr(value).split()), 60)


def plain(value: Any) -> Any:
    """Return a tensor, array or NumPy scalar without dimensions as a value of Python's, and those of a mapping so."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    scalar = isinstance(value, (Tensor, np.ndarray, np.generic)) and value.ndim == 0
    return value.item() if scalar else value


def _meet(some: Iterable[Any], *others: Iterable[Any]) -> bool:
    return not {id(item) for item in some}.isdisjoint(map(id, chain(*others)))


LOADERS = "such as loopscope.data.TensorLoader(tensors, batch_size, order)"
WRAPPED = "a Loader, which a DataLoader becomes by loopscope.data.TorchLoader(dataloader, self.config.seed)"
OWN = "an optimizer of the parameters of the model that it is given: model.parameters()"
LOSS = "the loss alone, a tensor with its graph, without .item(), float(), detach() and no_grad()"
NUMBERS = "a dict with one number for each name, a text, such as {'val_loss': 0.5}"
OPTIONS = "a dict of options by hook, such as {'grad_clip': {'max_norm': 1.0}}"
RULES: list[tuple[str, Callable[..., Any], str]] = [
    ("build_model", lambda it: isinstance(it, nn.Module), "an nn.Module"),
    ("build_model", lambda it: any(each.requires_grad for each in it.parameters()), "a model with parameters to train"),
    ("prepare_model", lambda it, model, _: isinstance(it, nn.Module), "the model that it is given, or another"),
    ("build_optimizer", lambda it, _: hasattr(it, "param_groups"), "an optimizer, such as AdamW(model.parameters())"),
    ("build_optimizer", lambda it, model: _meet(model.parameters(), *(of["params"] for of in it.param_groups)), OWN),
    ("build_scheduler", lambda it, _: it is None or hasattr(it, "step"), "a scheduler of torch's, or None"),
    (
        "build_scheduler",
        lambda it, of: _meet((getattr(it, "optimizer", None) or of).param_groups, of.param_groups),
        "one of the optimizer it is given",
    ),
    ("build_loader", lambda it, _: not isinstance(it, DataLoader), WRAPPED),
    ("build_loader", lambda it, _: isinstance(it, Loader), f"a Loader, {LOADERS}"),
    ("build_loader", lambda it, _: length_hint(it) > 0, "a loader whose len() says that it has batches"),
    ("state_dict", lambda it: isinstance(it, Mapping), "a dict"),
    ("compute_loss", lambda it, *_: isinstance(it, Tensor), LOSS),
    ("compute_loss", lambda it, *_: it.requires_grad or not torch.is_grad_enabled(), LOSS),
    ("compute_loss", lambda it, *_: not (it.ndim or it.is_complex()), "one real number, such as the mean()"),
    ("evaluate", lambda it, _: fits(plain(it), Mapping[str, float | bool]), NUMBERS),
    ("strategy_hooks", lambda it, _: fits(it, Mapping[str, Mapping[str, Any]]), OPTIONS),
    ("tensor_parallel_plan", lambda it, _: isinstance(it, Mapping), "a dict of ParallelStyles by the names of layers"),
    ("should_stop", lambda it, _: isinstance(plain(it), bool), "True or False"),
]
"""Methods of an experiment with rules for what they return, and in words what that must be."""
RETURNED = {method: [row[1:] for row in RULES if row[0] == method] for method, *_ in RULES}


def check_device(name: str | None) -> torch.device:
    """Return the device called ``name``; ``None`` means the accelerator if there is one, the CPU otherwise."""
    # Without check_available torch names what it was built for: CUDA, in its default wheel for Linux, on any machine.
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
