"""The targets of a step: found in the arguments of the model's calls or in the batch, and aligned with the logits."""

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from loopscope.data import MicroBatches, rows
from loopscope.errors import LoopscopeError
from loopscope.hooks import ForwardCall
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

NAMES = ("labels", "label", "targets", "target")
"""Names of targets among the arguments of a model and the entries of a batch."""
NAMES_IN_BATCH = (*NAMES, "y")
CAUSAL_LOSSES = ("ForCausalLM", "ForConditionalGeneration")
"""Losses of transformers that compare the logits of a token with the next label."""
CAUSAL_MODELS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of models of transformers with such a loss, where the model does not name its loss."""


class BatchCursor:
    """The place of the model's calls in the batch of a step: each call takes the next rows, or the next micro-batch.

    The micro-batches of a custom loop may be added to the batch while the step runs.
    """

    def __init__(self, batch: Any = None) -> None:
        self._parts: list[Any] = batch if isinstance(batch, MicroBatches) else [batch]
        self._index = self._row = 0

    def take(self, count: int) -> tuple[Any, slice] | None:
        """Return the part of the batch for a call with ``count`` rows, and which of its rows these are.

        ``None`` if all rows of the batch have been taken.
        """
        if self._index >= len(self._parts):
            return None
        part = self._parts[self._index]
        try:
            size = rows(part)
        except LoopscopeError:  # a batch without tensors
            size = count
        window = slice(self._row, self._row + count)
        self._row += count
        if self._row >= size:
            self._index, self._row = self._index + 1, 0
        return part, window

    @property
    def is_spent(self) -> bool:
        """Whether the calls have taken all rows, each once."""
        return self._index == len(self._parts)


def rows_of_call(call: ForwardCall, default: int) -> int:
    """Return the number of rows in a call of the model: the length of its first tensor."""
    for leaf in tree_iter((call.args, dict(call.kwargs))):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    return default


def arguments_of(module: nn.Module, call: ForwardCall) -> dict[str, Any]:
    """Return the arguments of a call by name, positional ones too where the signature of ``forward`` names them."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*call.args, **call.kwargs).arguments
    except (TypeError, ValueError):
        bound = {}
    return {**bound, **call.kwargs}


def entry(container: Any, name: str) -> Any:
    """Return an entry of a batch by key, attribute, or position (``"1"``); ``None`` if there is none."""
    if isinstance(container, Mapping):
        return container.get(name)
    if isinstance(container, (tuple, list)) and name.isdigit():
        return container[int(name)] if int(name) < len(container) else None
    return getattr(container, name, None)


def labels_of_arguments(arguments: Mapping[str, Any], name: str = "") -> Any:
    """Return the labels among the arguments of a model, by name, or else by the usual names; ``None`` without any."""
    if name:
        return arguments.get(name)
    return next((arguments[usual] for usual in NAMES if isinstance(arguments.get(usual), Tensor)), None)


def labels_of_batch(batch: Any, name: str = "") -> Any:
    """Return the labels in a batch, by name, or else by the usual names, or as the second of a pair."""
    if name:
        return _tensor(entry(batch, name))
    for usual in NAMES_IN_BATCH:
        if (labels := _tensor(entry(batch, usual))) is not None:
            return labels
    is_sequence = isinstance(batch, (tuple, list)) and len(batch) >= 2
    return _tensor(batch[1]) if is_sequence else None


def _tensor(value: Any) -> Any:
    """Return a tensor, an array as a tensor, or the only one of them in a container; ``None`` for anything else."""
    leaves = [leaf for leaf in tree_iter(value) if isinstance(leaf, (Tensor, np.ndarray))]
    return torch.as_tensor(leaves[0]) if len(leaves) == 1 else None


def shifts_labels(module: nn.Module, model: nn.Module) -> bool:
    """Return whether a model of transformers compares the logits of a token with the label of the next token."""
    owner: Any = module if hasattr(module, "config") else model
    if not hasattr(owner, "config") or getattr(owner.config, "is_encoder_decoder", False):
        return False
    loss_type = getattr(owner, "loss_type", None)
    return loss_type in CAUSAL_LOSSES if loss_type else type(owner).__name__.endswith(CAUSAL_MODELS)


def align(logits: Tensor, labels: Any, *, shift: bool, ignore_index: int) -> tuple[Tensor, Tensor] | None:
    """Return logits with classes last, shape (…, C), and the target of each row, shape (…); ``None`` if they mismatch.

    Accepted are integer labels of the shape (…) of logits (…, C), of logits (N, C, …) as in ``cross_entropy``, and of
    flattened logits. Targets that do not count, because they equal ``ignore_index`` or are no class, become −1.

    Args:
        logits: the logits.
        labels: the labels.
        shift: the logits of a token are compared with the next label; the last token then has no target.
        ignore_index: the label of rows that do not count.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex() or not labels.ndim:
        return None
    if labels.dtype == torch.bool:
        return None
    if labels.shape != logits.shape[:-1]:
        if logits.ndim > 2 and labels.shape == (logits.shape[0], *logits.shape[2:]):
            logits = logits.movedim(1, -1)
        elif logits.ndim == 2 and labels.numel() == len(logits):
            logits = logits.view(*labels.shape, -1)
        else:
            return None
    targets = labels.to(logits.device, torch.int64)
    if shift and targets.ndim >= 2:
        targets = torch.nn.functional.pad(targets[..., 1:], (0, 1), value=-1)
    counts = (targets >= 0) & (targets < logits.shape[-1]) & (targets != ignore_index)
    return logits, torch.where(counts, targets, -1)
