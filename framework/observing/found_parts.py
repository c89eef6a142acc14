"""Optimizers, schedulers and scalers of a script that has not named them."""

import gc
import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


def optimizers_over(parameters: Iterable[Any]) -> list[Optimizer]:
    """Return the optimizers that train some of the parameters, in the order of their creation.

    Of several that share parameters, one that the calling functions refer to counts: the oldest that has not made a
    step, since loops use them in this order. Without such one it is the newest.
    """
    own = {id(parameter) for parameter in parameters}
    found = [item for item in _objects((Optimizer,)) if own & _ids_of(item)]
    found = [item for item in found if not wrapped_by(item)]
    referred = referred_by_callers() if len(found) > 1 else set()
    unused = [item for item in found if id(item) in referred and not vars(item).get("state")]
    others = sorted(reversed(found), key=lambda one: id(one) not in referred)
    chosen: list[Optimizer] = []
    for item in [*unused, *others]:
        if not any(_ids_of(item) & _ids_of(other) for other in chosen):
            chosen.append(item)
    return [item for item in found if any(item is one for one in chosen)]


def modules_over(parameters: Iterable[Any]) -> list[nn.Module]:
    """Return the smallest module that has all of the parameters, otherwise the outermost ones that together have them.

    Of modules with the same parameters, such as a model and its replica, it is the outermost. Parameters of no module
    are left out, and so are graphs that the compiler has made of other modules.
    """
    wanted = {id(parameter) for parameter in parameters}
    own = {item: {id(one) for one in item.parameters()} for item in _objects((nn.Module,))}
    found = [item for item in own if own[item] & wanted]
    found = [item for item in found if not _is_graph(item)] or found
    held = wanted & {key for item in found for key in own[item]}
    complete = [item for item in found if own[item] >= held]
    least = min((len(own[item]) for item in complete), default=0)
    found = [item for item in complete if len(own[item]) == least] or found
    inner = {id(child) for item in found for child in item.modules() if child is not item}
    return [item for item in found if id(item) not in inner]


def _is_graph(module: nn.Module) -> bool:
    # GraphModule makes a class for every graph; its import takes long.
    return any(base.__module__ == "torch.fx.graph_module" for base in type(module).__mro__)


def _ids_of(optimizer: Optimizer) -> set[int]:
    """Return the ids of the parameters of an optimizer; of one whose construction has failed, none."""
    groups = vars(optimizer).get("param_groups") or ()
    return {id(parameter) for group in groups for parameter in group["params"]}


def wrapped_by(optimizer: Optimizer) -> list[Any]:
    """Return the optimizers that a wrapper, such as that of Accelerate, holds in its attributes."""
    return [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]


def schedulers_of(optimizer: Optimizer) -> list[Any]:
    """Return the schedulers of an optimizer that exist, without those that another one, such as SequentialLR, steps."""
    found = [
        item for item in _objects((LRScheduler, ReduceLROnPlateau)) if getattr(item, "optimizer", None) is optimizer
    ]
    inner = {id(part) for item in found for value in vars(item).values() if isinstance(value, list) for part in value}
    return [item for item in found if id(item) not in inner]


def scaler_in_use() -> GradScaler | None:
    """Return the only enabled scaler of losses that the calling functions refer to, if there is one."""
    scalers = {id(value): value for value in _values_of_callers() if issubclass(type(value), GradScaler)}
    found = [item for item in scalers.values() if item.is_enabled()]
    return found[0] if len(found) == 1 else None


def _objects(kinds: tuple[type, ...]) -> list[Any]:
    # By the type itself: isinstance() would ask objects for their __class__, which runs code of lazy proxies.
    # Within a generation, and from the oldest to the newest one, objects are in the order of their creation.
    objects = [item for generation in (2, 1, 0) for item in gc.get_objects(generation=generation)]
    return [*{id(item): item for item in objects if issubclass(type(item), kinds)}.values()]


def referred_by_callers() -> set[int]:
    """Return the ids of the variables of all calling functions, and of the attributes of their objects."""
    return {*map(id, _values_of_callers())}


def _values_of_callers() -> Iterator[Any]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield from (*frame.f_locals.values(), *frame.f_globals.values())
        for value in (*frame.f_locals.values(),):
            space = getattr(value, "__dict__", None)
            if type(space) is dict:
                yield from (*space.values(),)
        frame = frame.f_back
