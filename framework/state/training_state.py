"""The one list of everything that the rest of a run depends on.

The guardian copies it, the tripwire watches it, the audit digests it, the durable checkpoint stores it and the
tests of bit identity compare it: what is added here is known to all of them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .digest import digest
from .flags import GlobalFlags
from .own_hooks import OwnHook
from .random_streams import RandomStreams
from .structure import Structure
from .tensor_parts import inner_tensors

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
    evaluated_at: int | None = None
    """The step after which ``evaluation`` was made."""
    gradient_sum: dict[str, Tensor] | None = None
    gradient_steps: int = 0
    step_series: Tensor | None = None
    """Loss and gradient norm of the steps of the epoch (step loop: since SNAPSHOT), one column each, and room for
    more; float64."""
    series_steps: int = 0
    accumulated_grads: dict[str, Tensor] | None = None
    prev_step_grads: dict[str, Tensor] | None = None
    current_grads: dict[str, Tensor] | None = None
    pre_epoch: Any = None
    """The snapshot taken at PRE_EPOCH; handed to nobody, so the guardian need not copy it."""
    loss_scale: float | None = None
    """What the loss of the step was multiplied by for its backward pass (float16 only)."""
    skipped_steps: int = 0
    """Steps whose update was skipped, since their gradients left float16."""
    stopped: bool = False
    reached: dict[str, int] | None = None

    def in_flight(self) -> tuple[Tensor, ...]:
        """Return the tensors that hooks are shown and the loop goes on with: batch, losses, kept gradients."""
        shown = [leaf for leaf in (self.loss, self.running_loss, self.step_series) if leaf is not None]
        batch = self.batch
        if isinstance(batch, tuple) and all(isinstance(leaf, Tensor) for leaf in batch):
            shown += batch
        elif batch is not None:
            shown += [leaf for _, leaf in nested("", batch) if isinstance(leaf, Tensor)]
        for vector in (self.gradient_sum, self.accumulated_grads, self.prev_step_grads, self.current_grads):
            if vector:
                shown += vector.values()
        return tuple(shown)

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

    def __post_init__(self) -> None:
        """Count generators that modules own, for stochastic rounding say, among those of the run."""
        values = [value for module in self.model.modules() for value in vars(module).values()]
        found = [value for value in values if isinstance(value, torch.Generator) and value not in self.streams.owned]
        self.streams.owned += tuple(dict.fromkeys(found))

    @property
    def roots(self) -> tuple[Any, ...]:
        """The objects from which everything but gradients, generators, flags and extras can be reached."""
        return self.model, self.optimizer, self.scheduler, self.scaler, vars(self.loop)

    def _leaves(self) -> Iterator[tuple[str, Any]]:
        """Yield every tensor and plain value with its name; this is the list."""
        known = set()
        for name, leaf in chain(self._model_leaves(), self._optimizer_leaves(), self._loop_leaves()):
            known.add(id(leaf))
            if isinstance(leaf, Tensor):
                known.update(map(id, inner_tensors(leaf)))
            yield name, leaf
        others = [tensor for tensor in Structure(self.roots).tensors if id(tensor) not in known]
        yield from ((f"other tensors/{index}", tensor) for index, tensor in enumerate(others))

    def _model_leaves(self) -> Iterator[tuple[str, Any]]:
        for name, parameter in self.model.named_parameters():
            yield f"parameters/{name}", parameter
            yield f"requires_grad/{name}", parameter.requires_grad
            yield f"gradients/{name}", parameter.grad
            yield f"gradient hooks/{name}", _of_others(parameter._backward_hooks)
            yield f"gradient hooks/{name}/after", _of_others(parameter._post_accumulate_grad_hooks)
        for name, buffer in self.model.named_buffers():
            yield f"buffers/{name}", buffer
        for name, module in self.model.named_modules():
            yield f"modules/{name}", (type(module), *map(tuple, (module._parameters, module._buffers, module._modules)))
            for key, value in vars(module).items():
                if "_hooks" in key and isinstance(value, dict):
                    yield f"module hooks/{name}.{key}", _of_others(value)
                elif key not in ("_parameters", "_buffers", "_modules"):
                    yield from nested(f"modules/{name}.{key}", value)

    def _optimizer_leaves(self) -> Iterator[tuple[str, Any]]:
        names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        for parameter, state in self.optimizer.state.items():
            yield from nested(f"optimizer/{names.get(parameter, 'unknown')}", state)
        for index, group in enumerate(self.optimizer.param_groups):
            yield f"optimizer/group {index}/params", [names.get(item, "unknown") for item in group["params"]]
            for key, option in group.items():
                if key != "params":
                    yield from nested(f"optimizer/group {index}/{key}", option)
        for key, value in vars(self.optimizer).items():
            if key not in ("state", "param_groups"):
                yield from nested(f"optimizer/{key}", [*value.values()] if "_hooks" in key else value)
        for label, owner in (("scheduler", self.scheduler), ("scaler", self.scaler), *self.extras.items()):
            if owner is not None:
                yield from nested(label, owner.state_dict())

    def _loop_leaves(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self.loop).items():
            yield from nested(f"loop/{name}", value.tensors if name == "pre_epoch" and value is not None else value)
        for name, flag in zip(self.flags.names, self.flags.read_all(), strict=True):
            yield f"flags/{name}", flag

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state, by name."""
        return {name: leaf for name, leaf in self._leaves() if isinstance(leaf, Tensor)}

    def names(self) -> dict[int, str]:
        """Return the names of tensors, modules and their containers by the object's id."""
        found = {id(tensor): name for name, tensor in self.tensors().items()}
        for name, module in self.model.named_modules():
            found |= {id(module): f"modules/{name}", id(vars(module)): f"modules/{name}"}
            found |= {id(item): f"modules/{name}.{key}" for key, item in vars(module).items() if isinstance(item, dict)}
        for label, owner in (("optimizer", self.optimizer), ("scheduler", self.scheduler), ("loop", self.loop)):
            if owner is not None:
                found |= {id(owner): label, id(vars(owner)): label}
        return found

    def digest(self) -> dict[str, int]:
        """Return a 64-bit digest of every byte of the state, entry by entry."""
        entries = {name: digest(leaf) for name, leaf in self._leaves()}
        streams = self.streams.save()
        entries["generators/torch"] = digest(streams.torch_cpu)
        entries["generators/python"] = digest((streams.python.key, streams.python.cached_gaussian))
        entries["generators/numpy"] = digest((streams.numpy.key, streams.numpy.cached_gaussian))
        for index, (_, state) in enumerate((*streams.accelerators, *streams.owned)):
            entries[f"generators/{index}"] = digest(state)
        return entries


def _of_others(hooks: Mapping[int, Any] | None) -> list[Any]:
    """Return the hooks that are there without loopscope's own, which change nothing they do not declare."""
    return [hook for hook in (hooks or {}).values() if not isinstance(hook, OwnHook)]


def differing(before: Mapping[str, int], after: Mapping[str, int]) -> list[str]:
    """Name the entries of two digests that differ, or that only one of them has."""
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]


ON_DEMAND = (
    *("gradient_sum", "gradient_steps", "accumulated_grads", "prev_step_grads", "current_grads"),
    *("step_series", "series_steps", "pre_epoch"),
)


def of_the_run(digest: Mapping[str, int]) -> dict[str, int]:
    """Leave out of a digest what the loop keeps only because a hook asked for it: the rest is equal in every run."""
    wanted = tuple(f"loop/{name}" for name in ON_DEMAND)
    return {name: value for name, value in digest.items() if not name.startswith(wanted)}
