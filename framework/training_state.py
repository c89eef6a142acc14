"""The one list of everything that the rest of a run depends on.

The guardian copies it, the tripwire watches it, the audit digests it, the durable checkpoint stores it and the
tests of bit identity compare it: what is added here is known to all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import xxhash
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from framework.flags import GlobalFlags
from framework.param_vectors import local_shards
from framework.random_streams import RandomStreams

MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
PLAIN = (bool, int, float, complex, str, bytes, type(None), tuple, torch.dtype, torch.device)


class Stateful(Protocol):
    """Anything with a state of its own that the run depends on: a strategy, an experiment."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state back."""
        ...


@dataclass
class LoopState:
    """The loop's own position and accumulators."""

    epoch: int = 0
    step: int = 0
    batch_idx: int | None = None
    batch: Any = None
    loss: Tensor | None = None
    epoch_loss: float | None = None
    running_loss: Tensor | None = None
    running_steps: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    gradient_sum: dict[str, Tensor] | None = None
    gradient_steps: int = 0
    accumulated_grads: dict[str, Tensor] | None = None
    prev_step_grads: dict[str, Tensor] | None = None
    current_grads: dict[str, Tensor] | None = None
    pre_epoch: Any = None
    """The snapshot taken at PRE_EPOCH; handed to nobody, so the guardian need not copy it."""
    stopped: bool = False
    reached: dict[str, int] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the batch in flight and the pre-epoch snapshot, which the next epoch renews."""
        return {
            name: value for name, value in vars(self).items() if name not in ("batch", "pre_epoch", "batch_idx", "loss")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        vars(self).update(state)


def nested(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dicts and lists with their paths."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from nested(f"{prefix}/{key}", item)
    elif isinstance(value, (list, tuple)) and any(isinstance(item, (Tensor, Mapping, list, tuple)) for item in value):
        for index, item in enumerate(value):
            yield from nested(f"{prefix}/{index}", item)
    else:
        yield prefix, value


@dataclass
class TrainingState:
    """Everything the rest of the run depends on, held by reference."""

    model: nn.Module
    optimizer: Optimizer
    streams: RandomStreams
    loop: LoopState = field(default_factory=LoopState)
    scheduler: LRScheduler | None = None
    scaler: torch.amp.GradScaler | None = None
    extras: Mapping[str, Stateful] = field(default_factory=dict)
    flags: GlobalFlags = field(default_factory=GlobalFlags)

    def _named_leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield every tensor and plain value with its name; this is the list."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, name in names.items():
            yield f"parameters/{name}", parameter
            yield f"requires_grad/{name}", parameter.requires_grad
            yield f"gradients/{name}", parameter.grad
            yield f"gradient hooks/{name}", len(parameter._backward_hooks or ())
        for name, buffer in self.model.named_buffers():
            yield f"buffers/{name}", buffer
        for name, module in self.model.named_modules():
            yield from _module_leaves(name, module)
        for parameter, state in self.optimizer.state.items():
            yield from nested(f"optimizer/{names.get(parameter, 'unknown')}", state)
        for index, group in enumerate(self.optimizer.param_groups):
            for key, option in group.items():
                shown = [names.get(item, "unknown") for item in option] if key == "params" else option
                yield from nested(f"optimizer/group {index}/{key}", tuple(shown) if key == "params" else shown)
        for label, owner in (("scheduler", self.scheduler), ("scaler", self.scaler), *self.extras.items()):
            if owner is not None:
                yield from nested(label, owner.state_dict())
        for name, value in vars(self.loop).items():
            yield from nested(f"loop/{name}", value.tensors if name == "pre_epoch" and value is not None else value)
        for name, flag in zip(self.flags.names, self.flags.read(), strict=True):
            yield f"flags/{name}", flag

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name."""
        return {name: leaf for name, leaf in self._named_leaves() if isinstance(leaf, Tensor)}

    def digest(self) -> dict[str, int]:
        """Return a 64-bit digest of every byte of the state, entry by entry."""
        entries = {name: _digest(leaf) for name, leaf in self._named_leaves()}
        streams = self.streams.save()
        entries["generators/torch"] = _digest(streams.torch_cpu)
        entries["generators/python"] = _digest(streams.python)
        entries["generators/numpy"] = _digest((streams.numpy.key, streams.numpy.cached_gaussian))
        for index, (_, state) in enumerate((*streams.accelerators, *streams.owned)):
            entries[f"generators/{index}"] = _digest(state)
        return entries


def _module_leaves(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if isinstance(value, PLAIN) and not isinstance(value, tuple):
            yield f"modules/{name}.{key}", value
    for key in MODULE_HOOKS:
        yield f"module hooks/{name}.{key}", len(vars(module)[key])


def _digest(leaf: Any) -> int:
    """Digest a tensor's dtype, shape and bytes, or a plain value's text (which is exact for floats)."""
    if not isinstance(leaf, Tensor):
        return xxhash.xxh3_64_intdigest(repr(leaf).encode())
    (shard,) = local_shards([leaf])
    raw = shard.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return xxhash.xxh3_64_intdigest(
        raw.data, seed=xxhash.xxh3_64_intdigest(f"{shard.dtype}{tuple(shard.shape)}".encode())
    )


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Name the entries of two digests that differ, or that only one of them has."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


ON_DEMAND = ("gradient_sum", "gradient_steps", "accumulated_grads", "prev_step_grads", "current_grads", "pre_epoch")


def of_the_run(digest: Mapping[str, int]) -> dict[str, int]:
    """Leave out of a digest what the loop keeps only because a hook asked for it: the rest is equal in every run."""
    wanted = tuple(f"loop/{name}" for name in ON_DEMAND)
    return {name: value for name, value in digest.items() if not name.startswith(wanted)}
