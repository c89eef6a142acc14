"""The search for the module that produces the first non-finite value of a forward and backward pass."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from loopscope.state import InternalFunction
from loopscope.tensors import local_shards, tensor_of
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Producer:
    """The place where the first non-finite value of a pass appears.

    ``kind`` is "output" (of a module), "gradient" (in the backward pass through a module), "input" (of the model),
    or "loss" (computed from finite outputs). ``position`` orders the places of a pass in time. ``rows`` are positions
    in the batch of a micro-batch, if the first dimension of the value has them.
    """

    kind: str
    module: str
    position: int
    rows: tuple[int, ...] = ()


def has_nonfinite(tensors: Sequence[Tensor]) -> bool:
    """Return whether a tensor has a NaN or an infinite element."""
    return not all(_are_finite([shard for shard in local_shards(tensors) if shard.is_floating_point()]))


def nonfinite_names(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors with a NaN or an infinite element, after one transfer to the host."""
    floats = [(name, tensor) for name, tensor in named if tensor.is_floating_point() and tensor.numel()]
    if not floats:
        return []
    flags = _are_finite(local_shards([tensor for _, tensor in floats]))
    return [name for (name, _), is_finite in zip(floats, flags, strict=True) if not is_finite]


def _are_finite(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether all its elements are finite; one transfer to the host if all tensors are."""
    # A sum of finite elements is finite unless it overflows, and takes a twentieth of the time of isfinite().all().
    sums = [tensor.detach().sum(dtype=_sum_dtype(tensor)) for tensor in tensors]
    pairs = zip(tensors, tensor_of(sums).isfinite().tolist(), strict=True)
    return [has_finite_sum or _is_finite(tensor) for tensor, has_finite_sum in pairs]


def _is_finite(tensor: Tensor) -> bool:
    stored = tensor.coalesce().values() if tensor.is_sparse else tensor
    return bool(stored.to(_sum_dtype(tensor)).isfinite().all())


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.itemsize < torch.float32.itemsize else tensor.dtype


@dataclass
class PassRecorder:
    """Records, in passes inside of :meth:`attached`, the modules that turn finite values into non-finite ones.

    A module produces a value if its inputs are finite and its output is not. Children end before their parents, so the
    first such module is the innermost one; if the code of a module itself produces the value, it is that module. In
    the backward pass a module produces a value if the gradient of its output is finite and that of its input is not,
    or that of one of its own parameters. Values are those of the first tensor and of tensors that require a gradient,
    so that masks with −inf do not count.
    """

    producers: list[Producer] = field(default_factory=list)
    masks: list[Producer] = field(default_factory=list)
    """Modules whose output has −inf but neither +inf nor NaN, such as masked scores: producers only if there is no
    other."""
    _events: int = 0
    _backward: list["_ModuleUse"] = field(default_factory=list)

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Register the recorder on all modules of the model in the body."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                # Measurements restore the state of a script's own module hooks, but not of internal ones.
                before, after = InternalFunction(_with_aliases), InternalFunction(partial(self._after_forward, name))
                stack.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                stack.callback(module.register_forward_hook(after, with_kwargs=True).remove)
            yield

    def first(self, bad_gradients: Set[str]) -> Producer | None:
        """Return the producer that comes first in time, after the passes.

        ``bad_gradients`` are the names of the parameters with a non-finite gradient.
        """
        found = [*self.producers] or [*self.masks]
        in_backward = [use.producer(bad_gradients) for use in self._backward]
        found += [producer for producer in in_backward if producer is not None]
        return min(found, key=attrgetter("position"), default=None)

    def _after_forward(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._events += 1
        inputs, outputs = _watched((args, kwargs)), _watched(output)
        if has_nonfinite(outputs):
            if not has_nonfinite(inputs):
                is_mask = not any(bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in outputs)
                kind = self.masks if is_mask else self.producers
                kind.append(Producer("output", name, self._events, _rows(outputs)))
            elif not name:
                self.producers.append(Producer("input", name, 0, _rows(inputs)))
        if torch.is_grad_enabled():
            use = _ModuleUse(name, module, self)
            use.attach(inputs, outputs)
            self._backward.append(use)

    def next_position(self) -> int:
        """Return the position of an event in the backward pass."""
        self._events += 1
        return self._events


def _with_aliases(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Replace the inputs of a module by aliases, whose gradients are those that come through this module alone."""
    return tree_map_only(
        Tensor, lambda tensor: tensor.view_as(tensor) if tensor.requires_grad else tensor, (args, kwargs)
    )


class _ModuleUse:
    """The gradients of the outputs, inputs and own parameters of one use of a module."""

    def __init__(self, name: str, module: nn.Module, recorder: PassRecorder) -> None:
        self._name, self._recorder = name, recorder
        self._own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
        self._output_is_finite = True
        self._output_position = 0
        self._input_position = 0
        self._rows: tuple[int, ...] = ()

    def attach(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Register hooks on tensors of the graph, with which they disappear."""
        for tensors, function in ((outputs, self._on_output), (inputs, self._on_input)):
            for tensor in tensors:
                if tensor.requires_grad and not tensor.is_leaf:  # a hook on a leaf would remain
                    tensor.register_hook(function)  # type: ignore[no-untyped-call]

    def _on_output(self, gradient: Tensor) -> None:
        self._output_is_finite = self._output_is_finite and not has_nonfinite([gradient])
        self._output_position = self._output_position or self._recorder.next_position()

    def _on_input(self, gradient: Tensor) -> None:
        if not self._input_position and self._output_is_finite and has_nonfinite([gradient]):
            self._input_position, self._rows = self._recorder.next_position(), _rows([gradient])

    def producer(self, bad_gradients: Set[str]) -> Producer | None:
        """Return this use as a producer, if it is one; ``bad_gradients`` are the parameters with non-finite ones."""
        if self._input_position:
            return Producer("gradient", self._name, self._input_position, self._rows)
        if self._output_position and self._output_is_finite and not bad_gradients.isdisjoint(self._own):
            return Producer("gradient", self._name, self._output_position)
        return None


def _watched(values: Any) -> list[Tensor]:
    """Return the first floating-point tensor, and the other ones that require a gradient."""
    leaves = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return [leaf for index, leaf in enumerate(leaves) if not index or leaf.requires_grad]


def _rows(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the indices along the first dimension at which a tensor is not finite."""
    rows: set[int] = set()
    for tensor in local_shards(tensors):
        if tensor.ndim > 1:
            is_bad = ~tensor.isfinite().flatten(1).all(1)
            rows |= {*is_bad.nonzero().flatten().tolist()}
    return tuple(sorted(rows))


def search(model: nn.Module, repeat: Callable[[], Mapping[str, Tensor]]) -> Producer | None:
    """Return the producer of the first non-finite value in a forward and backward pass; ``None`` if there is none.

    Args:
        model: the model.
        repeat: runs the passes and returns the gradients by parameter name.
    """
    recorder = PassRecorder()
    with recorder.attached(model), torch.enable_grad():
        gradients = repeat()
    return recorder.first({*nonfinite_names([*gradients.items()])})
