"""Traces of attention scores that a layer computes itself, from the product of queries and keys to the softmax.

A layer may scale its scores, cap them, add biases and masks, append sinks, and subtract the maximum of each row. The
input of the softmax is therefore not the score; its trace tells what happened to q·k.
"""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..hooks import WrittenCall

PRODUCTS = {"matmul", "rmatmul", "bmm", "baddbmm", "einsum"}
SCALES = {"mul", "rmul", "imul", "multiply", "div", "truediv", "itruediv", "true_divide", "divide"}
DIVISIONS = {"div", "truediv", "itruediv", "true_divide", "divide"}
SUMS = {"add", "radd", "iadd", "masked_fill", "where"}
DIFFERENCES = {"sub", "isub", "subtract"}
JOINS = {"cat", "concat", "concatenate"}
COPIES = {
    "float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach", "view", "reshape",
    "view_as", "unflatten", "nan_to_num",
}  # fmt: skip
MAXIMA = {"max", "amax"}
STATISTICS = COPIES | {"unsqueeze", "expand", "expand_as", "getitem"}
"""Functions whose result is still one number for each row."""


@dataclass(frozen=True)
class Trace:
    """What has happened to q·k so far; the fields are those of :class:`.WrittenCall`."""

    query: Tensor | None
    key: Tensor | None
    scale: float | Tensor | None
    cap: float | Tensor | None = None
    keys: int | None = None
    shifts: tuple[Tensor, ...] = ()

    def times(self, factor: Any, *, divided: bool) -> "Trace":
        """Return the trace after a multiplication or division; a factor by place makes the scale unknown."""
        is_tensor = isinstance(factor, Tensor)
        if self.scale is None or (is_tensor and factor.ndim and (factor.ndim != 4 or factor.shape[2:] != (1, 1))):
            return replace(self, scale=None)
        if self.shifts:
            return replace(self, scale=None, shifts=())
        factor = factor.detach() if is_tensor else float(factor)
        product = self.scale if self.cap is None else self.cap
        product = product / factor if divided else product * factor
        return replace(self, scale=product) if self.cap is None else replace(self, cap=product)


class ScoreTraces:
    """The traces of the tensors of one pass of a module."""

    def __init__(self) -> None:
        self._traces: MutableMapping[Tensor, Trace] = WeakTensorKeyDictionary()
        """The traces by tensors that may become the input of a softmax."""
        self._maxima: MutableMapping[Tensor, bool] = WeakTensorKeyDictionary()
        """The tensors with the maximum of each row of scores."""
        self._outputs: dict[int, tuple[Tensor, Tensor]] = {}  # by weight: a linear layer's weight and output

    @property
    def projections(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """The weights of the linear layers so far, each with the layer's output."""
        return tuple((weight, output.detach()) for weight, output in self._outputs.values())

    def call_of(self, scores: Tensor) -> WrittenCall:
        """Return the attention call of a softmax over scores of shape (batch, heads, queries, keys and sinks)."""
        trace = self._traces.get(scores) or Trace(None, None, None)
        batch, heads, _, columns = scores.shape
        keys = columns if trace.keys is None else trace.keys
        query, key = (_by_head(part, batch, heads) for part in (trace.query, trace.key))
        if query is None or key is None or query.shape[:3] != scores.shape[:3] or key.shape[::2] != (batch, keys):
            query = key = None
        return WrittenCall(
            query=query,
            key=key,
            scores=scores.detach(),
            keys=keys,
            shifts=trace.shifts,
            scale=None if query is None else trace.scale,
            cap=trace.cap,
        )

    def follow(self, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        """Update the traces after a call of a function of torch."""
        name = getattr(function, "__name__", "").strip("_")
        if isinstance(result, Tensor):
            self._project(name, args, kwargs, result)
        if name in PRODUCTS:
            if isinstance(result, Tensor) and result.ndim in (3, 4):
                self._start(name, args, kwargs, result)
            return
        if not self._traces:
            return
        if name in MAXIMA and args and isinstance(args[0], Tensor):
            self._maximum(args, kwargs, result)
        elif name in JOINS and args and isinstance(args[0], (tuple, list)):
            self._join(args[0], kwargs.get("dim", args[1] if len(args) > 1 else 0), result)
        elif isinstance(result, Tensor):
            self._transform(name, args, result)

    def _project(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Tensor) -> None:
        """Keep the output of a linear layer; a layer may reshape it, and add its bias separately."""
        if name in ("linear", "matmul"):
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
        elif name == "addmm":
            weight = args[2] if len(args) > 2 else None
        elif name in ("add", "iadd", "view", "reshape") and args and isinstance(args[0], Tensor):
            same_rows = result.shape[-1:] == args[0].shape[-1:]
            weights = [weight for weight, output in self._outputs.values() if output is args[0] and same_rows]
            weight = next(iter(weights), None)
        else:
            return
        if _is_parameter(weight) and weight.ndim == 2:
            self._outputs[id(weight)] = weight, result

    def _start(self, name: str, args: Any, kwargs: Mapping[str, Any], result: Tensor) -> None:
        if name == "einsum":
            self._traces[result] = Trace(None, None, None)
            return
        first, second = args[-2:] if len(args) > 1 else (None, None)
        if name == "rmatmul":
            first, second = second, first
        scale: float | None = 1.0
        if name == "baddbmm":  # beta·input + alpha·q·k
            scale = float(kwargs.get("alpha", 1.0))
        if isinstance(first, Tensor) and isinstance(second, Tensor) and first.ndim == second.ndim == result.ndim:
            self._traces[result] = Trace(as_computed(first), as_computed(second).mT, scale)

    def _maximum(self, args: Any, kwargs: Mapping[str, Any], result: Any) -> None:
        if args[0] in self._traces and (len(args) > 1 or kwargs):
            values = result if isinstance(result, Tensor) else result[0]
            self._maxima[values] = True

    def _join(self, parts: Any, dim: int, result: Tensor) -> None:
        """Append sinks to the keys."""
        first = parts[0]
        trace = self._traces.get(first) if isinstance(first, Tensor) else None
        if trace is not None and dim in (-1, result.ndim - 1):
            self._traces[result] = replace(trace, keys=trace.keys or first.shape[-1])

    def _transform(self, name: str, args: Any, result: Tensor) -> None:
        tensors = [part for part in args[:3] if isinstance(part, Tensor)]
        if name in STATISTICS and tensors and tensors[0] in self._maxima:
            self._maxima[result] = True
            return
        source = next((part for part in tensors if part in self._traces), None)
        if source is None:
            return
        trace = self._traces[source]
        other = next((part for part in args[:2] if part is not source), None)
        if name in SCALES:
            trace = trace.times(other, divided=name in DIVISIONS)
        elif name == "tanh":
            trace = replace(trace, cap=1.0, scale=None if trace.cap is not None else trace.scale)
        elif name in DIFFERENCES and isinstance(other, Tensor) and other in self._maxima:
            row = (*result.shape[:-1], 1)
            trace = replace(trace, shifts=(*trace.shifts, other.detach().expand(row)))
        elif name in (SUMS | DIFFERENCES) or (name in COPIES and result.shape[-1] == source.shape[-1]):
            pass
        elif result.shape == source.shape and name not in ("softmax", "dropout", "exp"):
            trace = replace(trace, scale=None)
        else:
            return
        self._traces[result] = trace


def _is_parameter(tensor: Any) -> bool:
    """Return whether a tensor is a parameter, or stands for one while AOTAutograd records a graph."""
    if type(tensor).__module__ == "torch._subclasses.functional_tensor":
        tensor = torch._from_functional_tensor(tensor.elem)
    return isinstance(tensor, nn.Parameter)


def as_computed(tensor: Tensor) -> Tensor:
    """Return a detached tensor in the dtype in which autocasting multiplies it."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype is not torch.float64:
        tensor = tensor.detach().to(torch.get_autocast_dtype(kind))
    return tensor.detach()


def _by_head(part: Tensor | None, batch: int, heads: int) -> Tensor | None:
    """Return queries or keys as (batch, heads, tokens, head_dim); batch and heads may be one dimension."""
    if part is None or part.ndim == 4:
        return part
    return part.reshape(batch, -1, *part.shape[1:]) if len(part) == batch * heads else None
