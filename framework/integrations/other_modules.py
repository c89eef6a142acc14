"""Modules of a training outside of its model, such as a discriminator or a teacher: given, or found in the loss."""

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from inspect import getclosurevars
from itertools import count
from threading import get_ident
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..data import Batch
from ..doctor.senses import leaves_of
from ..errors import require
from ..isolation import VISITS, undone_in_modules
from ..state import FullSharding, Structure, TrainingState, tensors_of
from ..training import LossProbe, ObservedPass, Profiler, TrainingTask
from .attach_options import Loss
from .model_wrappers import unwrap


def given_modules(given: Mapping[Any, Any], model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of ``also=`` without wrappers of torch.compile and DistributedDataParallel.

    Raises:
        UsageError: for a value that is no module, and a name that is no text or that the model uses itself.
    """
    of_model = {name.partition(".")[0] for name, _ in _named(model)}
    for name, module in given.items():
        kind, is_module = type(module).__name__, isinstance(module, nn.Module)
        require(is_module, f"also has a {kind} under {name!r}; give modules: also={{'discriminator': discriminator}}.")
        is_free = isinstance(name, str) and name != "" and name not in of_model
        advice = "choose a text that is no name of a part of the model, such as 'discriminator'"
        require(is_free, f"also has a module under the name {name!r}; {advice}.")
    return {name: unwrap(module)[0] for name, module in given.items()}


def _named(model: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from model.named_modules()
    yield from model.named_parameters()
    yield from model.named_buffers()


class UnownedTensors(nn.Module):
    """Tensors with gradients that belong to no module, such as a learned temperature of the loss."""

    def __init__(self, tensors: list[Any]) -> None:
        super().__init__()
        # Written to the table, since register_parameter() accepts only instances of nn.Parameter.
        self._parameters.update({str(index): tensor for index, tensor in enumerate(tensors)})


def modules_of_loss(
    task: TrainingTask, state: TrainingState, batch: Batch, loss: Loss
) -> tuple[dict[str, nn.Module], ObservedPass | None]:
    """Return the modules outside of the training state that the loss of a batch uses, by a name for each.

    Also returns what else the pass showed, or ``None`` if the loss failed. The loss is computed once, without side
    effects. Modules are found when they are called or changed, other tensors with a gradient in the autograd graph of
    the loss.
    A loss that fails uses no modules here: the hook that computes it later reports the error.
    """
    known = {*map(id, state.modules.modules()), *map(id, state.modules.parameters())}
    found: list[nn.Module] = []
    leaves: list[weakref.ref[Tensor]] = []
    seen, completed = ObservedPass(), None
    with VISITS, suppress(Exception), _changed_collected(loss, known, found), _collected(known, found):
        with seen.observe(state.model):
            value = LossProbe(task, state, Profiler()).loss_with_graph(batch)
        leaves = [weakref.ref(leaf) for leaf in leaves_of(value)]
        seen.add_loss(value)
        completed = seen
        del value
    of_found = {id(parameter) for module in found for parameter in module.parameters()}
    of_batch = {*map(id, tensors_of(batch))}
    # FSDP2 computes with gathered parameters, which no module holds afterwards and whose storage is freed.
    gathered = {id(item) for sharding in (state.sharding, *map(FullSharding, found)) for item in sharding.gathered()}
    # The graph is gone here, and with it the tensors that the loss creates to compute a derivative.
    living = [leaf for reference in leaves if (leaf := reference()) is not None]
    loose = [leaf for leaf in living if id(leaf) not in known | of_found | of_batch | gathered]
    modules = [module for module in found if any(True for _ in (*module.parameters(), *module.buffers()))]
    named = _with_names(modules, loss, state) | ({"tensors of the loss": UnownedTensors(loose)} if loose else {})
    return named, completed


@contextmanager
def _collected(known: set[int], found: list[nn.Module]) -> Iterator[None]:
    """Append the outermost unknown modules that the body calls to ``found``; undo their changes."""
    inner: set[int] = set()
    thread = get_ident()
    with ExitStack() as stack:

        def collect(module: nn.Module, inputs: Any) -> None:
            # Other threads may train other models, whose modules are none of this loss.
            if get_ident() == thread and id(module) not in known and id(module) not in inner:
                inner.update(map(id, module.modules()))
                found.append(unwrap(module)[0])
                stack.enter_context(undone_in_modules([module]))

        stack.callback(register_module_forward_pre_hook(collect).remove)
        yield


@contextmanager
def _changed_collected(loss: Loss, known: set[int], found: list[nn.Module]) -> Iterator[None]:
    """Append the unknown modules that the body changes and the loss function refers to; undo their changes."""
    values = [value for _, value in _variables(loss)]
    modules = [module for module in Structure([loss, *values]).of_kind(nn.Module) if id(module) not in known]
    inner = {id(item) for module in modules for item in (*module.modules(),)[1:]}
    with ExitStack() as stack:
        copies = [
            (module, stack.enter_context(undone_in_modules([module]))) for module in modules if id(module) not in inner
        ]
        yield
        called = {*map(id, found)}
        found += [module for module, copy in copies if id(module) not in called and copy.is_changed()]


def _variables(loss: Loss) -> list[tuple[str, Any]]:
    """Return the global and enclosing variables that the loss function reads, with their names."""
    with suppress(TypeError, ValueError):  # an object with __call__, a built-in function
        read = getclosurevars(loss)
        return [*read.globals.items(), *read.nonlocals.items()]
    return []


def _with_names(modules: list[nn.Module], loss: Loss, state: TrainingState) -> dict[str, nn.Module]:
    """Return modules by the name of their variable in the loss function, or of their class."""
    variables = {id(value): name for name, value in _variables(loss)}
    taken = {name.partition(".")[0] for name, _ in _named(state.model)} | state.also.keys()
    named: dict[str, nn.Module] = {}
    for module in modules:
        name = variables.get(id(module), type(module).__name__)
        names = (name if number == 1 else f"{name} {number}" for number in count(1))
        named[next(name for name in names if name not in taken and name not in named)] = module
    return named
