"""Python imports this module at the start of every process under ``loopscope watch``; it imports nothing slow.

It waits until torch's optimizers, or a trainer, are imported. The first optimizer that is created, or the first
training of a trainer, imports loopscope, which attaches itself to the training. If that fails, the training continues
without it.
"""

import atexit
import functools
import os
import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from typing import Any

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_OPTIMIZERS = "torch.optim.optimizer"
_CREATED = {_OPTIMIZERS: "on_optimizer", "fastai.optimizer": "on_other_optimizer"}
"""What reports that a class ``Optimizer`` has an instance, by the module of the class."""
_GROUPS = "torch.distributed.distributed_c10d"
_MODULES = "torch.nn.modules.module"
_NOTES_ARGUMENTS = "LOOPSCOPE_WATCH_ALONE" in os.environ
"""Set by ``loopscope check``, which constructs models again."""
_TRAINERS = {
    "transformers.trainer": "train",
    "lightning.pytorch.trainer.trainer": "fit",
    "pytorch_lightning.trainer.trainer": "fit",
}
"""The method of the class ``Trainer`` that trains, by the module that defines it."""
_REPORTS = {
    "wandb.sdk.wandb_run": ("Run", "log"),
    "torch.utils.tensorboard.writer": ("SummaryWriter", "add_scalar"),
    "trackio": ("", "log"),
    "mlflow.tracking.fluent": ("", "log_metric", "log_metrics"),
    "stable_baselines3.common.logger": ("Logger", "dump"),
}
"""The class, if any, and the functions by which loggers receive numbers, by module."""
_ENVIRONMENTS = ("gymnasium.wrappers.common", "gymnasium.wrappers.order_enforcing")
"""The modules, by version, with the wrapper that ``gymnasium.make`` puts around every environment."""
_SEEDING = {"random": ("seed",), "numpy.random": ("seed", "default_rng"), "torch.random": ("manual_seed",)}
"""The functions that seed generators, by module."""
_SHIFT = int(os.environ.get("LOOPSCOPE_WATCH_SEED", 0))
_GIVEN_UP: list[bool] = []


def _watched() -> Any:
    """Return the module of loopscope that attaches to trainings, or ``None`` if it cannot be imported."""
    if _GIVEN_UP:
        return None
    try:
        return import_module("loopscope.integrations.watched_process")
    except BaseException as error:
        _give_up(error)
        return None


def _give_up(error: BaseException) -> None:
    if not _GIVEN_UP:
        _GIVEN_UP.append(True)
        reason = f"{type(error).__name__}: {str(error).rstrip('.')}"
        sys.stderr.write(f"loopscope watch: {reason}. The training continues without loopscope.\n")


def _tell(name: str, *inputs: Any) -> None:
    """Call a function of the watching module; its errors never reach the script."""
    module = _watched()
    if module is None:
        return
    try:
        getattr(module, name)(*inputs)
    except Exception as error:
        _give_up(error)


def _on_import(module: Any) -> None:
    name = module.__name__
    if name in _SEEDING:
        _with_shifted_seeds(module, _SHIFT)
    elif name in _CREATED:
        if _SHIFT and name == _OPTIMIZERS:
            _shift_generators(sys.modules["torch"], _SHIFT)
        _after(module.Optimizer, "__init__", lambda optimizer, _: _tell(_CREATED[name], optimizer))
    elif name == _MODULES:
        _note_arguments(module.Module)
    elif name == _GROUPS:
        _before(module, "destroy_process_group", lambda *_: _tell("on_group_end"))
    elif name in _TRAINERS:
        _before_training(module.Trainer, _TRAINERS[name])
    elif name in _ENVIRONMENTS:
        for function in ("reset", "step"):
            _after(module.OrderEnforcing, function, functools.partial(_tell, "on_environment", function))
    else:
        owner, *functions = _REPORTS[name]
        for function in functions:
            place = getattr(module, owner) if owner else module
            report = functools.partial(_tell, "on_report", f"{name}.{function}")
            _before(place, function, report, named=True)


def _after(owner: Any, name: str, tell: Any) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(self, *args, **kwargs)
        if "torch" in sys.modules:
            tell(self, result)
        return result

    setattr(owner, name, wrapper)


def _before(owner: Any, name: str, tell: Any, *, named: bool = False) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tell(args, kwargs) if named else tell(*args)
        return function(*args, **kwargs)

    setattr(owner, name, wrapper)


def _before_training(owner: Any, name: str) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapper(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        is_replaced = name in vars(trainer)
        _tell("on_trainer", trainer)
        if not is_replaced and name in vars(trainer):  # loopscope has, in this Trainer, and calls the function itself
            return vars(trainer)[name](*args, **kwargs)
        return function(trainer, *args, **kwargs)

    setattr(owner, name, wrapper)


def _note_arguments(base: Any) -> None:
    """Note the arguments with which every module is constructed."""
    from weakref import ref

    noted: dict[int, Any] = {}
    """By the id of the module, which may define a hash of its contents, or none."""
    base._loopscope_arguments = noted
    initialise = base.__init__

    @functools.wraps(initialise)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if id(self) in noted:
            return
        try:
            if (arguments := _arguments_of(self, sys._getframe(1))) is not None:
                noted[id(self)] = ref(self, functools.partial(_forget, noted, id(self))), arguments
        except Exception:  # such as of arguments that a constructor has replaced: the module is not constructed again
            pass

    base.__init__ = wrapper


def _arguments_of(module: Any, frame: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a module's constructor, which is one of the callers; ``None`` if it is not found."""
    from inspect import getargvalues

    outermost = None
    while frame is not None and frame.f_code.co_name == "__init__":
        if next(iter(frame.f_locals.values()), None) is not module:
            break
        frame, outermost = frame.f_back, frame
    own_code: Any = getattr(type(module).__init__, "__code__", None)
    if outermost is None or outermost.f_code is not own_code:
        return None
    names, rest, options, values = getargvalues(outermost)
    count = outermost.f_code.co_argcount
    inputs = [values[name] for name in names[1:count] if name in values]
    named = {name: values[name] for name in names[count:] if name in values}
    return (*inputs, *values.get(rest or "", ())), {**named, **values.get(options or "", {})}


def _forget(noted: dict[int, Any], key: int, _: object) -> None:
    noted.pop(key, None)


class _Loader:
    """A loader that runs a module as another one does, and then :func:`_on_import`."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        try:
            _on_import(module)
        except Exception as error:
            _give_up(error)


class _Finder:
    """Finds the modules of this file by the other finders, and wraps their loaders."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        is_seeding = name in _SEEDING and _SHIFT
        is_noted = name == _MODULES and _NOTES_ARGUMENTS
        is_known = name == _GROUPS or name in (*_CREATED, *_TRAINERS, *_REPORTS, *_ENVIRONMENTS)
        if not (is_known or is_seeding or is_noted):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: Any = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


def _with_shifted_seeds(module: Any, shift: int) -> None:
    """Add a number to every seed that the script sets by functions of a module."""
    for name in _SEEDING[module.__name__]:
        setattr(module, name, _shifted(getattr(module, name), shift))


def _shifted(function: Any, shift: int) -> Any:
    def shifted(seed: Any) -> Any:
        # Also NumPy's integers; None and texts are seeds of Python's generator that no number can be added to.
        is_number = hasattr(seed, "__index__") and not isinstance(seed, bool)
        return seed + shift if is_number else seed

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        args = (*map(shifted, args[:1]), *args[1:])
        return function(*args, **{name: shifted(item) for name, item in kwargs.items()})

    return wrapper


def _shift_generators(torch: Any, shift: int) -> None:
    """Replace the class of torch's generators by a subclass whose ``manual_seed`` adds a number."""
    base: Any = torch.Generator
    kind: Any = type(base)

    def is_generator(cls: Any, item: Any) -> bool:
        return isinstance(item, base)

    def manual_seed(generator: Any, seed: int) -> Any:
        return base.manual_seed(generator, seed + shift)

    of_any: Any = type("OfAny", (kind,), {"__instancecheck__": is_generator})
    torch.Generator = of_any("Generator", (base,), {"manual_seed": manual_seed})


def _load_hidden() -> None:
    """Load the ``sitecustomize`` that this one hides, if there is one."""
    paths = [path for path in sys.path if os.path.abspath(path or os.curdir) != _FOLDER]
    spec = PathFinder.find_spec("sitecustomize", paths)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _say_if_nothing_started() -> None:
    """Say at the end of the command's own process that neither it nor its children have trained."""
    path = os.environ.get("LOOPSCOPE_WATCH_STARTED", "")
    if os.environ.get("LOOPSCOPE_WATCH_ROOT") != str(os.getpid()):  # a process that the command has forked
        return
    try:
        is_empty = os.path.getsize(path) == 0
        os.unlink(path)
    except OSError:
        return
    if is_empty:
        sys.stderr.write(
            "loopscope watch: no step of an optimizer of torch was seen, so nothing is recorded; optimizers of other "
            "kinds are not noticed, apart from fastai's.\n"
        )


if "LOOPSCOPE_WATCH" in os.environ:
    if os.environ.get("LOOPSCOPE_WATCH_ROOT") == str(os.getpid()):
        atexit.register(_say_if_nothing_started)
    sys.meta_path.insert(0, _Finder())
    if _SHIFT and "random" in sys.modules:
        _with_shifted_seeds(sys.modules["random"], _SHIFT)
sys.path[:] = [path for path in sys.path if os.path.abspath(path or os.curdir) != _FOLDER]
_load_hidden()
