"""Declared changes: recorded while a hook runs, applied after it was rolled back."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import accumulate, chain, product
from typing import NamedTuple, TypeVarTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import LoopscopeError, UsageError, unknown
from ..state import Vector, byte_tensors, gradients, joint_norm, live_gradients, local_shards, overwrite
from ..training import takes_closure

Values = TypeVarTuple("Values")


class StatePart(Enum):
    """A part of the training state that an intervention may declare to change."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"


def refuse_what_is_computed_anew(treatments: Mapping[str, Iterable[str]], optimizer: Optimizer) -> None:
    """Raise :class:`UsageError` for a hook whose commits an optimizer would undo that evaluates the loss several times.

    ``treatments`` are the parts that hooks declare to change, by the hook's name.
    """
    for hook, parts in treatments.items():
        changed = {StatePart.GRADIENTS.value, StatePart.OPTIMIZER.value}.intersection(parts)
        if changed and takes_closure(optimizer):
            raise UsageError(
                f"Hook {hook!r} changes the {' and '.join(sorted(changed))}, but {type(optimizer).__name__} computes "
                "gradients several times a step, of which a hook reaches the first alone; leave the hook out, or take "
                "an optimizer that computes them once."
            )


class UndeclaredCommitError(UsageError):
    """A hook asked to keep a change that its class does not declare; ends the run whatever ``--on-hook-error`` says."""


@dataclass
class CommitRecord:
    """The changes that one call of one hook asked to keep, in order; nothing is changed before ``apply``."""

    hook: str
    declared: frozenset[StatePart]
    changes: list[Callable[[], None]] = field(default_factory=list)

    def record(self, part: StatePart, verb: str, change: Callable[[*Values], None], *arguments: *Values) -> None:
        """Queue ``change(*arguments)``; raises :class:`UndeclaredCommitError` unless the hook declares ``part``."""
        if part not in self.declared:
            raise UndeclaredCommitError(
                f"{verb} changes the {part.value}, which hook {self.hook!r} does not declare; "
                f"add commits = {{StatePart.{part.name}}} to its class."
            )
        self.changes.append(partial(change, *arguments))

    def apply(self) -> None:
        """Make the recorded changes, in the order in which they were asked for."""
        for change in self.changes:
            change()


class Memory:
    """The memory in which the parameters of a model and their gradients lie, all of it that commits write to."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Note where that memory is at this moment."""
        owners = list(parameters)
        spans = sorted(_spans([*owners, *live_gradients(owners)]))
        self._begins = [begin for begin, _ in spans]
        self._reaches = [*accumulate([end for _, end in spans], max)]  # a storage may lie within another, as arrays do

    def holds(self, tensor: Tensor) -> bool:
        """Return whether the tensor shares a storage with it, or its bytes by way of an array; wrappers may, always."""
        pairs = [(begin, bisect_left(self._begins, end)) for begin, end in _spans([tensor])]
        return not pairs or any(count and self._reaches[count - 1] > begin for begin, count in pairs)


def _spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return where the storages of the tensors' own bytes begin and end; those of wrappers are left out."""
    parts = chain.from_iterable(map(byte_tensors, local_shards(tensors)))
    storages = [part.untyped_storage() for part in parts]
    return [(begin := storage.data_ptr(), begin + storage.nbytes()) for storage in storages]


class Clipping(NamedTuple):
    """The joint norm of the gradients, and the factor that brings it down to a limit."""

    norm: Tensor
    factor: Tensor

    @classmethod
    def of(cls, tensors: list[Tensor], max_norm: float) -> "Clipping":
        """Measure; the factor is min(1, max_norm / (norm + 1e-6)), as in ``torch.nn.utils.clip_grad_norm_``."""
        norm = joint_norm(tensors)
        return cls(norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients so that their joint norm is at most ``max_norm``."""
    live = live_gradients(parameters)
    scale(live, Clipping.of(live, max_norm).factor)


@torch.no_grad()
def scale(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors of any devices by ``factor``, in place."""
    shards = local_shards(tensors)
    # One foreach call for each device, since a factor that is a tensor has to lie on the device of what it multiplies.
    devices = {shard.device for shard in shards}
    for device in devices:
        own = shards if len(devices) == 1 else [shard for shard in shards if shard.device == device]
        torch._foreach_mul_(own, factor.to(device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def scale_each(model: nn.Module, factors: Mapping[str, float | Tensor]) -> None:
    """Multiply the gradient of every named parameter that has one by its own factor, in place."""
    live = gradients(model)
    names = [name for name in factors if name in live]
    for shard, name in zip(local_shards([live[name] for name in names]), names, strict=True):
        factor = factors[name]
        shard.mul_(factor.to(shard.device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def clamp(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Bring every element of the gradients into [−max_value, max_value], in place; NaN stays NaN.

    The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
    """
    shards = local_shards(live_gradients(parameters))
    if shards:  # foreach refuses an empty list
        torch._foreach_clamp_min_(shards, -max_value)
        torch._foreach_clamp_max_(shards, max_value)


@torch.no_grad()
def add_scaled(model: nn.Module, values: Vector, factor: Tensor) -> None:
    """Add ``factor`` times the values to the gradients of their names, in place; a parameter without one gets none."""
    live = gradients(model)
    names = [name for name in values if name in live]
    own, others = ([vector[name] for name in names] for vector in (live, values))
    for gradient, value in zip(local_shards(own), local_shards(others), strict=True):
        # One kernel, and the factor stays on its device: as a Python number it would have to be waited for.
        gradient.addcmul_(value.to(gradient.dtype), factor.to(gradient))


@torch.no_grad()
def replace_gradients(model: nn.Module, values: Vector) -> None:
    """Give the named parameters these gradients, in place where they have one."""
    parameters = dict(model.named_parameters())
    for name in values:
        if parameters[name].grad is None:  # its values are written below, over whatever is in the memory
            parameters[name].grad = torch.empty_like(parameters[name])
    overwrite(gradients(model), values)


@torch.no_grad()
def blend(model: nn.Module, target: Vector, weight: float) -> None:
    """Move the named parameters to (1 − weight)·θ + weight·target, computed in the wider of the two dtypes."""
    parameters = dict(model.named_parameters())
    # One call for all tensors; and lerp would make NaN of a θ that is infinite.
    if weight == 1:
        overwrite(parameters, target)
        return
    names = list(target)
    shards = zip(local_shards([parameters[name] for name in names]), local_shards(target.values()), strict=True)
    for parameter, aim in shards:
        # lerp takes two tensors of one dtype only.
        wide = torch.promote_types(parameter.dtype, aim.dtype)
        parameter.copy_(parameter.to(wide).lerp(aim.to(wide), weight))


def thaw(parameters: Mapping[str, nn.Parameter]) -> None:
    """Have the parameters trained."""
    for parameter in parameters.values():
        parameter.requires_grad_(True)


def forget(optimizers: Iterable[Optimizer], parameters: Mapping[str, nn.Parameter]) -> None:
    """Take out of the optimizers what they remember of the parameters, which are new to them at their next step."""
    for optimizer, parameter in product(optimizers, parameters.values()):
        # Optimizers make the state of a parameter at its first step, so that a missing one is as good as new.
        optimizer.state.pop(parameter, None)


def parameters_named(model: nn.Module, names: Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the named parameters; raises :class:`UsageError` for a name that the model lacks."""
    parameters, chosen = dict(model.named_parameters()), list(names)
    for name in chosen:
        if name not in parameters:
            raise unknown("parameter", name, parameters)
    return {name: parameters[name] for name in chosen}


def check_factors(model: nn.Module, factors: Mapping[str, float | Tensor]) -> None:
    """Raise unless every name in ``factors`` is a parameter of the model, and every factor one number."""
    parameters_named(model, factors)
    for name, factor in factors.items():
        if isinstance(factor, Tensor) and factor.ndim:
            raise LoopscopeError(
                f"The factor of {name!r} has shape {tuple(factor.shape)}; a factor is a number or a zero-dimensional "
                "tensor."
            )


def check_vector(model: nn.Module, vector: Vector) -> None:
    """Raise unless every name in ``vector`` is a parameter of the model, of the same shape."""
    for name, parameter in parameters_named(model, vector).items():
        if vector[name].shape != parameter.shape:
            raise LoopscopeError(
                f"The vector's {name!r} has shape {tuple(vector[name].shape)}, but the parameter has "
                f"{tuple(parameter.shape)}."
            )
