"""Taps: functions that read or replace gradients, read values of the forward pass, or count quantisations."""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

if TYPE_CHECKING:
    from .attention_calls import AttentionCall

OnGradient = Callable[[Tensor], Tensor | None]
"""A function of a tensor, which returns ``None`` or a replacement."""


@runtime_checkable
class Quantized(Protocol):
    """A module that quantises outside of compiled graphs, and counts the losses of every quantisation."""

    def count_quantizations(self, is_active: Callable[[], bool], counts: MutableMapping[str, Any]) -> RemovableHandle:
        """Add the counts of each quantisation to ``counts`` by role, while ``is_active`` returns ``True``."""


@dataclass(frozen=True)
class QuantizationTap:
    """Counts of the quantisation losses of one module, in the passes of the training step only.

    Args:
        target: the name of a :class:`Quantized` module in the model.
        counts: the counts (:class:`.Counts`) by role; the tap fills it, and the hook reads and clears it.
    """

    target: str
    counts: MutableMapping[str, Any]


@dataclass(frozen=True)
class GradientTap:
    """A function that reads or replaces a gradient in the backward pass, or reads a module's input in the forward pass.

    Args:
        target: the name of a parameter or module of the model.
        kind: ``"parameter"``: the gradient of a parameter; ``"output"``: the gradient of a module's first output
            tensor; ``"weight"``: the part of the gradient of a shared weight that comes from this module;
            ``"elsewhere"``: the part of that gradient that comes from the rest of the model; ``"input"``: the module's
            first input tensor, detached. If the target is used several times in a step, the tap is called once per use;
            a recomputation of activation checkpointing is not a use of an input.
        function: takes the tensor; returns ``None``, or a replacement if ``replaces``.
        replaces: the tap changes the gradient; requires ``commits = {StatePart.GRADIENTS}``.
    """

    target: str
    kind: Literal["parameter", "output", "weight", "elsewhere", "input"]
    function: OnGradient
    replaces: bool = False


@dataclass(frozen=True)
class ForwardCall:
    """One use of a module in the forward pass: its inputs and its output, with every tensor detached."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


@dataclass(frozen=True)
class ForwardTap:
    """A function that reads the inputs and outputs of a module in the forward passes of the training step.

    It is called without gradient tracking, once per use: for every micro-batch, and for every use of a module that the
    model uses several times. A recomputation of activation checkpointing is not a use.

    Args:
        target: the name of a module of the model; ``""`` is the model itself.
        function: takes a :class:`ForwardCall`. It must not change its tensors, which are those of the training.
    """

    target: str
    function: Callable[[ForwardCall], None]


@dataclass(frozen=True)
class AttentionTap:
    """A function that reads the attention calls of a module in the forward passes of the training step.

    It is called without gradient tracking, before each attention that the module computes by ``nn.MultiheadAttention``,
    ``scaled_dot_product_attention``, a softmax over (batch, heads, queries, keys), or the flash attention of a model of
    Hugging Face. A call in another module inside of the target, which is tapped as well, belongs to that module. A
    recomputation of activation checkpointing is not a call.

    Args:
        target: the name of a module of the model.
        function: takes an :class:`AttentionCall`. It must not change its tensors, which are those of the training.
    """

    target: str
    function: Callable[["AttentionCall"], None]


class Recorder(Protocol):
    """An object that reads the calls of a step between its first pass and its update."""

    def recording(self, model: nn.Module, is_active: Callable[[], bool]) -> AbstractContextManager[Any]:
        """Record the passes of a model in the body, while ``is_active`` returns ``True``."""


@dataclass(frozen=True)
class StepTap:
    """A recorder of whole steps: their passes, and the calls of torch from outputs to the loss.

    Args:
        recorder: what records; it must not change the tensors, which are those of the training.
        always: record in all steps, not only on those of the hook's ``step_schedule``.
    """

    recorder: Recorder
    always: bool = False
    target: str = ""


Tap = GradientTap | ForwardTap | AttentionTap | QuantizationTap | StepTap
"""A tap of any kind."""


@dataclass(frozen=True)
class TapOwner:
    """The hook of some taps, as the set of a run's taps needs it.

    ``is_due`` returns whether the taps are called on this step; ``call(target, function)`` runs one on the hook's
    random stream and handles its errors; ``may_replace`` is set if the hook declares commits of gradients.
    """

    hook: str
    is_due: Callable[[], bool]
    call: Callable[[str, Callable[[], Tensor | None]], Tensor | None]
    may_replace: bool
