"""Commits: lasting changes of the training state, recorded during a hook call and applied after its rollback."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, product
from typing import TypeVarTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import LoopscopeError, UsageError, unknown
from ..hooks import Clipping, StatePart, UndeclaredCommitError
from ..names import as_names
from ..state import TrainingState, optimizers_of
from ..tensors import Vector, byte_tensors, gradients, joint_norm, live_gradients, local_shards, overwrite
from ..training import takes_closure

Values = TypeVarTuple("Values")


def refuse_commits_for_closures(treatments: Mapping[str, Iterable[str]], optimizer: Optimizer) -> None:
    """Refuse hooks whose commits are lost if the optimizer evaluates the loss several times per step.

    ``treatments`` lists the parts that each hook declares to change, by the hook's name.

    Raises:
        UsageError: a hook commits gradients or optimizer state, and the optimizer takes a closure.
    """
    for hook, parts in treatments.items():
        changed = {StatePart.GRADIENTS.value, StatePart.OPTIMIZER.value}.intersection(parts)
        if changed and takes_closure(optimizer):
            raise UsageError(
                f"Hook {hook!r} changes the {' and '.join(sorted(changed))}, but {type(optimizer).__name__} computes "
                "gradients several times a step, and a hook changes only the first ones; leave the hook out, or choose "
                "an optimizer that computes them once."
            )


@dataclass
class CommitRecord:
    """The commits of one hook call, in order; nothing changes before ``apply``."""

    hook: str
    declared: frozenset[StatePart]
    changes: list[Callable[[], None]] = field(default_factory=list)

    def record(self, part: StatePart, verb: str, change: Callable[[*Values], None], *arguments: *Values) -> None:
        """Queue ``change(*arguments)``.

        Raises:
            UndeclaredCommitError: the hook does not declare ``part``.
        """
        if part not in self.declared:
            raise UndeclaredCommitError(
                f"{verb} changes the {part.value}, which hook {self.hook!r} does not declare; "
                f"add commits = {{StatePart.{part.name}}} to its class."
            )
        self.changes.append(partial(change, *arguments))

    def apply(self) -> None:
        """Apply the recorded changes, in order."""
        for change in self.changes:
            change()


class ParameterMemory:
    """The memory of parameters and their gradients, which commits overwrite."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the current addresses of the storages."""
        owners = list(parameters)
        spans = sorted(_storage_spans([*owners, *live_gradients(owners)]))
        self._starts = [start for start, _ in spans]
        # The largest end of the first k spans: a storage can contain another one, because NumPy arrays share memory.
        self._max_ends = [*accumulate([end for _, end in spans], max)]

    def overlaps(self, tensor: Tensor) -> bool:
        """Return whether a tensor shares memory with the parameters; ``True`` for wrappers, whose memory is unknown."""
        pairs = [(start, bisect_left(self._starts, end)) for start, end in _storage_spans([tensor])]
        return not pairs or any(count and self._max_ends[count - 1] > start for start, count in pairs)


def _storage_spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the start and end addresses of the tensors' storages, without those of wrapper subclasses."""
    parts = chain.from_iterable(map(byte_tensors, local_shards(tensors)))
    storages = [part.untyped_storage() for part in parts]
    return [(start := storage.data_ptr(), start + storage.nbytes()) for storage in storages]


def clipping_of(tensors: list[Tensor], max_norm: float) -> Clipping:
    """Return the joint norm of tensors and the factor that limits it; both are zero-dimensional."""
    # factor = min(1, max_norm / (‖g‖₂ + 1e-6)), as in torch.nn.utils.clip_grad_norm_
    norm = joint_norm(tensors)
    if all(tensor.dtype is not torch.float64 for tensor in tensors):
        norm = norm.float()  # like the norm of torch, so that the factors have equal bits
    return Clipping(norm, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def clip(parameters: Iterable[nn.Parameter], max_norm: float) -> None:
    """Scale the gradients so that their joint norm is at most ``max_norm``."""
    live = live_gradients(parameters)
    scale(live, clipping_of(live, max_norm).factor)


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Multiply the gradients by ``factor``, in place."""
    # looked up now, when the change is applied: an earlier commit may have created a parameter's gradient
    scale(live_gradients(parameters), factor)


@torch.no_grad()
def scale(tensors: list[Tensor], factor: float | Tensor) -> None:
    """Multiply tensors of any devices by ``factor``, in place."""
    shards = local_shards(tensors)
    # One foreach call per device: a factor that is a tensor must be on the device of the tensors that it multiplies.
    devices = {shard.device for shard in shards}
    for device in devices:
        on_device = shards if len(devices) == 1 else [shard for shard in shards if shard.device == device]
        torch._foreach_mul_(on_device, factor.to(device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def scale_each(model: nn.Module, factors: Mapping[str, float | Tensor]) -> None:
    """Multiply the gradient of every named parameter by its factor, in place; missing gradients are skipped."""
    live = gradients(model)
    names = [name for name in factors if name in live]
    for shard, name in zip(local_shards([live[name] for name in names]), names, strict=True):
        factor = factors[name]
        shard.mul_(factor.to(shard.device) if isinstance(factor, Tensor) else factor)


@torch.no_grad()
def clamp(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clamp every element of the gradients to [−max_value, max_value], in place; NaN stays NaN.

    The arithmetic is that of ``torch.nn.utils.clip_grad_value_``.
    """
    shards = local_shards(live_gradients(parameters))
    if shards:  # torch._foreach_* functions raise for an empty list
        torch._foreach_clamp_min_(shards, -max_value)
        torch._foreach_clamp_max_(shards, max_value)


@torch.no_grad()
def add_scaled(model: nn.Module, values: Vector, factor: Tensor) -> None:
    """Add ``factor`` times the values to the gradients of the same names, in place; missing gradients are skipped."""
    live = gradients(model)
    names = [name for name in values if name in live]
    targets, addends = ([vector[name] for name in names] for vector in (live, values))
    for gradient, value in zip(local_shards(targets), local_shards(addends), strict=True):
        # g ← g + value·factor in one kernel. The factor stays a tensor: .item() would synchronise with the device.
        gradient.addcmul_(value.to(gradient.dtype), factor.to(gradient))


@torch.no_grad()
def replace_gradients(model: nn.Module, values: Vector) -> None:
    """Set the gradients of the named parameters, in place if they exist."""
    parameters = dict(model.named_parameters())
    for name in values:
        if parameters[name].grad is None:  # overwritten below
            parameters[name].grad = torch.empty_like(parameters[name])
    overwrite(gradients(model), values)


@torch.no_grad()
def blend(model: nn.Module, target: Vector, weight: float) -> None:
    """Move the named parameters to (1 − weight)·θ + weight·target, computed in the wider of the two dtypes."""
    parameters = dict(model.named_parameters())
    # Copy if weight = 1: one call for all tensors, and lerp would return NaN for an infinite θ.
    if weight == 1:
        overwrite(parameters, target)
        return
    names = list(target)
    shards = zip(local_shards([parameters[name] for name in names]), local_shards(target.values()), strict=True)
    for parameter, goal in shards:
        # lerp requires both tensors to have the same dtype.
        wide = torch.promote_types(parameter.dtype, goal.dtype)
        parameter.copy_(parameter.to(wide).lerp(goal.to(wide), weight))


def thaw(parameters: Mapping[str, nn.Parameter]) -> None:
    """Set ``requires_grad`` of the parameters."""
    for parameter in parameters.values():
        parameter.requires_grad_(True)


def forget(state: TrainingState, parameters: Mapping[str, nn.Parameter]) -> None:
    """Remove the state of the parameters from all optimizers."""
    for optimizer, parameter in product(optimizers_of(state), parameters.values()):
        # Optimizers create a parameter's state at its first step, so a removed state is initialised again.
        optimizer.state.pop(parameter, None)


def parameters_named(model: nn.Module, names: str | Iterable[str]) -> dict[str, nn.Parameter]:
    """Return the named parameters; raise :class:`UsageError` for an unknown name."""
    parameters, requested = dict(model.named_parameters()), as_names(names)
    for name in requested:
        if name not in parameters:
            raise unknown("parameter", name, parameters)
    return {name: parameters[name] for name in requested}


def check_factors(model: nn.Module, factors: Mapping[str, float | Tensor]) -> None:
    """Raise an error unless every key is a parameter's name and every factor a number or zero-dimensional tensor."""
    parameters_named(model, factors)
    for name, factor in factors.items():
        if isinstance(factor, Tensor) and factor.ndim:
            raise LoopscopeError(
                f"The factor of {name!r} has shape {tuple(factor.shape)}; a factor is a number or a zero-dimensional "
                "tensor."
            )


def check_vector(model: nn.Module, vector: Vector) -> None:
    """Raise an error unless every key is the name of a parameter with the same shape."""
    for name, parameter in parameters_named(model, vector).items():
        if vector[name].shape != parameter.shape:
            raise LoopscopeError(
                f"The vector's {name!r} has shape {tuple(vector[name].shape)}, but the parameter has "
                f"{tuple(parameter.shape)}."
            )
